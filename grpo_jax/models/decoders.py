"""Which functions compute a model: the transformer's, or another network's."""

from grpo_jax.models import transformer
from grpo_jax.models.architecture import Decoder, Model


def decoder(model: Model) -> Decoder:
  """The functions of a model."""
  return model.decoder or transformer.DECODER
