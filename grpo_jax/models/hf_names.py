"""Names of Hugging Face's tensors, for every family of the Llama line."""

from grpo_jax.models.architecture import Architecture
from grpo_jax.models.names import Names, Tensor


def names(arch: Architecture, unit_offset: bool = False) -> Names:
  """Our paths -> their tensors. `{}` is the layer, and then the expert.

  Args:
    arch: the facts, which say what there is.
    unit_offset: stored norm scales are 0 where ours are 1.
  """
  layer, attn = "model.layers.{}.", "model.layers.{}.self_attn."
  add = 1.0 if unit_offset else 0.0

  def norm(name: str) -> Tensor:
    return Tensor(name + ".weight", (0,), add=add)

  table = {
    "embed": Tensor("model.embed_tokens.weight", (0, 1)),
    "layers/attn/q": Tensor(attn + "q_proj.weight", (1, 2, 0)),
    "layers/attn/k": Tensor(attn + "k_proj.weight", (1, 2, 0)),
    "layers/attn/v": Tensor(attn + "v_proj.weight", (1, 2, 0)),
    "layers/attn/o": Tensor(attn + "o_proj.weight", (2, 0, 1)),
    "final_norm": norm("model.norm"),
  }
  mlp = layer + ("mlp.experts.{}." if arch.experts else "mlp.")
  for x in ("gate", "up", "down"):
    table[f"layers/mlp/{x}"] = Tensor(f"{mlp}{x}_proj.weight", (1, 0))
  if arch.experts:
    table["layers/mlp/router"] = Tensor(layer + "mlp.gate.weight", (1, 0))
  # Where there are norms on both sides, the second has another name.
  before_mlp = "post_attention_layernorm"
  if arch.norms == "both":
    before_mlp = "pre_feedforward_layernorm"
  if arch.norms != "post":
    table["layers/attn_norm"] = norm(layer + "input_layernorm")
    table["layers/mlp_norm"] = norm(layer + before_mlp)
  if arch.norms != "pre":
    after = ("post_attention_layernorm", "post_feedforward_layernorm")
    table["layers/attn_post_norm"] = norm(layer + after[0])
    table["layers/mlp_post_norm"] = norm(layer + after[1])
  for x in ("q", "k"):
    if arch.qk_norm != "none":
      flat = arch.qk_norm == "width"
      table[f"layers/attn/{x}_norm"] = Tensor(
        f"{attn}{x}_norm.weight", (0, 1) if flat else (0,), flat, add
      )
  if arch.qkv_bias:
    for x in ("q", "k", "v"):
      name = f"{attn}{x}_proj.bias"
      table[f"layers/attn/{x}_bias"] = Tensor(name, (0, 1), flat=True)
  if not arch.tied:
    table["head"] = Tensor("lm_head.weight", (0, 1))
  return table
