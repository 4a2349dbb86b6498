import numpy as np
import pytest

from grpo_jax.errors import UserError
from grpo_jax.tokenizer import ByteTokenizer, make_tokenizer


def test_encode_adds_nothing_and_decode_inverts_it():
  tok = ByteTokenizer()
  assert tok.encode("ab>\n") == [97, 98, 62, 10]
  for text in ("", "née", "日本", "\x00", "<|endoftext|>"):
    assert tok.decode(tok.encode(text)) == text


def test_ids_are_distinct_and_within_the_vocabulary():
  tok = ByteTokenizer()
  assert len({tok.pad_id, tok.stop_id} | set(range(256))) == tok.vocab_size


def test_stop_is_silent_but_other_ids_cannot_hide():
  tok = ByteTokenizer()
  assert tok.decode(np.array([97, 98, tok.stop_id])) == "ab"
  # A sampled pad, or a row of a padded vocabulary, is not "ab".
  assert tok.decode([97, tok.pad_id, 98]) == "a\ufffdb"
  assert tok.decode([97, 300, 98]) == "a\ufffdb"
  assert tok.decode([0xE6, 0x97]) == "\ufffd"


def test_stop_ids():
  tok = ByteTokenizer()
  assert tok.stop_ids() == (257,)
  assert tok.stop_ids(("\n", "\n", ";")) == (257, 10, 59)
  assert tok.stop_ids("\n") == (257, 10)
  for bad in ("ab", "", "é"):
    with pytest.raises(UserError, match="exactly one token") as e:
      tok.stop_ids((bad,))
    assert repr(bad) in str(e.value)


def test_lone_surrogate_is_named():
  with pytest.raises(UserError, match="character 1"):
    ByteTokenizer().encode("a\ud800")


def test_make_tokenizer():
  assert make_tokenizer("byte").vocab_size == 258
  with pytest.raises(UserError, match="byte"):
    make_tokenizer("bytes")
