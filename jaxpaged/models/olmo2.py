"""OLMo 2: norms after attention and after the MLP, and on all query heads and all key heads together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import linen as nn

from jaxpaged.checkpoint.table import CheckpointTable
from jaxpaged.layers.attention import AttentionContext
from jaxpaged.models.config import ModelConfig, fill_defaults, read_config
from jaxpaged.models.decoder import Block, Decoder, Residual
from jaxpaged.models.hf_names import decoder_table

_NORMS = {"attn_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """`attention_bias` is on all four projections; eps is 1e-5 unless given."""
    bias = bool(hf.get("attention_bias", False))
    return read_config(fill_defaults(hf, {"rms_norm_eps": 1e-5}), qkv_bias=bias, out_bias=bias, qk_norm="full")


class PostNormBlock(Block):
    """What attention and the MLP give is normed before it joins the residual; what they take is not."""

    @nn.compact
    def __call__(
        self, residual: Residual, cos: jax.Array, sin: jax.Array, context: AttentionContext
    ) -> tuple[Residual, AttentionContext]:
        """See `Block.__call__`."""
        x = residual.x if residual.delta is None else residual.x + residual.delta
        y, context = self.attention()(x, cos, sin, context)
        x = x + self.norm("attn_norm", y)
        return Residual(x, self.norm("mlp_norm", self.mlp()(x))), context


class Olmo2(Decoder):
    """A stack of `PostNormBlock`."""

    block: ClassVar[type[Block]] = PostNormBlock


def table(config: ModelConfig) -> CheckpointTable:
    """Hugging Face's names."""
    return decoder_table(config, norms=_NORMS)
