import numpy as np
import pytest

from grpo_jax import data
from grpo_jax.errors import UserError
from grpo_jax.tasks.base import Example, Reward, Task, question_id
from grpo_jax.tasks.words import words
from grpo_jax.tokenizer import ByteTokenizer

TOK = ByteTokenizer()


def _examples(n):
  return [Example(question_id(str(i)), f"{i}>", str(i)) for i in range(n)]


def _task(prompts, **kwargs):
  rows = [Example(question_id(p), p, "x") for p in prompts]
  splits = {"train": rows, "tuning": (), "heldout": ()}
  return Task("t", splits, lambda e, c: Reward(0.0), **kwargs)


def test_resume_continues_the_order():
  # Faults A28: twelve prompts, killed after four, two passes per prompt. What
  # counts is the step, so the fifth draw follows the fourth.
  whole = data.Stream(_examples(12), 3, "train")
  order = [whole.draw(i).id for i in range(24)]
  resumed = data.Stream(_examples(12), 3, "train")
  again = [resumed.batch(step, 1)[0][0].id for step in range(4, 24)]
  assert order[4:] == again


def test_each_epoch_is_another_permutation():
  stream = data.Stream(_examples(50), 0, "train")
  epochs = [[stream.draw(50 * e + i).id for i in range(50)] for e in range(3)]
  assert all(len(set(e)) == 50 for e in epochs)
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
  # Back to an order that was dropped from the cache.
  assert [stream.draw(i).id for i in range(50)] == epochs[0]


def test_order_depends_on_seed_and_name_only():
  def order(seed, name):
    stream = data.Stream(_examples(50), seed, name)
    return [stream.draw(i).id for i in range(50)]

  assert order(0, "train") == order(0, "train")
  assert order(0, "train") != order(1, "train")
  assert order(0, "train") != order(0, "warmup")


def test_batch_cuts_the_same_order_whatever_its_size():
  stream = data.Stream(_examples(7), 0, "train")
  big, ordinals = stream.batch(1, 6)
  small = stream.batch(2, 3)[0] + stream.batch(3, 3)[0]
  assert [e.id for e in big] == [e.id for e in small]
  assert ordinals.tolist() == [6, 7, 8, 9, 10, 11]
  assert ordinals.dtype == np.int32


def test_stream_refuses():
  with pytest.raises(UserError, match="no examples"):
    data.Stream([], 0, "train")
  with pytest.raises(UserError, match="seed -1"):
    data.Stream(_examples(3), -1, "train")


def test_prompts_are_left_padded_with_lengths_of_their_own():
  out = data.encode_prompts(_examples(11)[9:], np.array([4, 5]), TOK, 5)
  pad = TOK.pad_id
  assert out["ids"].tolist() == [
    [pad, pad, pad, 57, 62],
    [pad, pad, 49, 48, 62],
  ]
  assert out["lengths"].tolist() == [2, 3]
  assert out["ordinals"].tolist() == [4, 5]
  assert all(v.dtype == np.int32 for v in out.values())


def test_lengths_do_not_come_from_token_values():
  # Faults A08: the pad id is also a token of the text.
  class PadIsText(ByteTokenizer):
    pad_id = 62

  out = data.encode_prompts(_examples(1), np.array([0]), PadIsText(), 4)
  assert out["ids"].tolist() == [[62, 62, 48, 62]]
  assert out["lengths"].tolist() == [2]


def test_prompt_that_does_not_fit_is_named():
  rows = [Example("i", "q" * 80, "")]
  with pytest.raises(UserError, match=r"80 tokens.*79.*max_prompt_tokens") as e:
    data.encode_prompts(rows, np.array([0]), TOK, 79)
  assert "q" * 60 in str(e.value) and "q" * 61 not in str(e.value)
  with pytest.raises(UserError, match="0 tokens"):
    data.encode_prompts([Example("i", "", "")], np.array([0]), TOK, 4)


def test_prompts_that_are_too_long_are_refused_or_dropped_never_cut():
  task = _task(["a", "abc", "abcde", "日本"])
  for limit in (0, 6):
    assert data.fit_prompts(task, TOK, limit) == (task, 6, {})
  with pytest.raises(UserError, match=r"2 of 4 prompts.* 4 tokens.* has 6"):
    data.fit_prompts(task, TOK, 4)
  fewer, width, lost = data.fit_prompts(task, TOK, 4, "drop")
  assert (width, sum(lost.values())) == (3, 2)
  assert data.fit_prompts(task, TOK, 5, "drop")[1:] == (
    5,
    {"train": 1, "tuning": 0, "heldout": 0},
  )
  left = [x.prompt for split in fewer.splits.values() for x in split]
  assert left == ["a", "abc"]
  with pytest.raises(UserError, match=r"all .* train prompts"):
    data.fit_prompts(_task(["abc", "abcd"]), TOK, 2, "drop")
  with pytest.raises(UserError, match="'cut' must be refuse or drop"):
    data.fit_prompts(task, TOK, 4, "cut")


def test_demonstrations_end_with_stop_and_ignore_the_batch():
  task = words(teacher_accuracy=0.5)
  rows = task.split("train")[:40]
  ordinals = np.arange(40)
  whole = data.encode_demonstrations(task, rows, ordinals, TOK, 0, 6)
  alone = data.encode_demonstrations(task, rows[7:8], ordinals[7:8], TOK, 0, 6)
  assert (whole["ids"][7:8] == alone["ids"]).all()
  other = data.encode_demonstrations(task, rows, ordinals, TOK, 1, 6)
  assert (whole["ids"] != other["ids"]).any()
  assert whole["ids"].shape == (40, 1, 6) and whole["lengths"].shape == (40, 1)
  for ids, length, example in zip(whole["ids"], whole["lengths"], rows):
    assert length[0] == len(example.answer) + 1
    assert ids[0, length[0] - 1] == TOK.stop_id
    assert (ids[0, length[0] :] == TOK.pad_id).all()
    assert sorted(TOK.decode(ids[0, : length[0]])) == sorted(example.answer)


def test_demonstrations_refuse():
  task = words()
  rows = [e for e in task.split("train") if len(e.answer) == 5][:1]
  with pytest.raises(UserError, match=r"6 tokens.*max_tokens 5"):
    data.encode_demonstrations(task, rows, [0], TOK, 0, 5)
  with pytest.raises(UserError, match="no demonstrations"):
    data.encode_demonstrations(_task(["a"]), rows, [0], TOK, 0, 9)


def test_chosen_questions_are_numbered_like_any_others():
  stream = data.Stream(_examples(7), 0, "rl")
  rows, ordinals = stream.batch(2, 3, np.array([6, 1, 6]))
  assert [e.answer for e in rows] == ["6", "1", "6"]
  assert ordinals.tolist() == stream.batch(2, 3)[1].tolist()
