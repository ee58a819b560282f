"""Llama 2 and 3, and models of their shape (SmolLM2, TinyLlama, Yi)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import linen as nn

from jaxpaged.checkpoint.table import CheckpointTable
from jaxpaged.layers.attention import AttentionContext
from jaxpaged.models.config import ModelConfig, read_config
from jaxpaged.models.decoder import Block, Decoder, Residual
from jaxpaged.models.hf_names import decoder_table


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """`attention_bias` is on all four projections, `mlp_bias` on all three."""
    bias = bool(hf.get("attention_bias", False))
    return read_config(hf, qkv_bias=bias, out_bias=bias, mlp_bias=bool(hf.get("mlp_bias", False)))


class PreNormBlock(Block):
    """Norm before attention and before the MLP, residuals around both."""

    @nn.compact
    def __call__(
        self, residual: Residual, cos: jax.Array, sin: jax.Array, context: AttentionContext
    ) -> tuple[Residual, AttentionContext]:
        """See `Block.__call__`."""
        x, y = self.add_norm("attn_norm", residual, context)
        delta, context = self.attention()(y, cos, sin, context)
        x, y = self.add_norm("mlp_norm", Residual(x, delta), context)
        return Residual(x, self.mlp()(y)), context


class Llama(Decoder):
    """A stack of `PreNormBlock`."""

    block: ClassVar[type[Block]] = PreNormBlock


def table(config: ModelConfig) -> CheckpointTable:
    """Hugging Face's names."""
    return decoder_table(config)
