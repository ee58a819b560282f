"""Gemma 2: norms before and after attention and MLP, (1 + w) norms, soft caps, windows on every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import linen as nn

from jaxpaged.checkpoint.table import CheckpointTable
from jaxpaged.layers.attention import AttentionContext
from jaxpaged.models.config import ModelConfig, fill_defaults, layer_count, layer_windows, read_config, require
from jaxpaged.models.decoder import Block, Decoder, Residual
from jaxpaged.models.hf_names import decoder_table

NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}

_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Even layers have the window unless `layer_types` says otherwise; a null soft cap means none."""
    hf = fill_defaults(hf, _DEFAULTS)
    types = hf.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(layer_count(hf))
    ]
    return read_config(
        hf,
        sliding_windows=layer_windows(hf, types, hf.get("sliding_window", 4096)),
        attn_soft_cap=hf.get("attn_logit_softcapping", 50.0),
        final_soft_cap=hf.get("final_logit_softcapping", 30.0),
        **gemma_facts(hf),
    )


def gemma_facts(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common. Embeddings are tied unless the config denies it."""
    bias = bool(hf.get("attention_bias", False))
    return {
        "activation": hf.get("hidden_activation") or "gelu_pytorch_tanh",  # hidden_act is wrong in early configs
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", True)),
        "sm_scale": float(hf["query_pre_attn_scalar"]) ** -0.5,
        "qkv_bias": bias,
        "out_bias": bias,
        "norm_offset": 1.0,
        "embed_scale": float(require(hf, "hidden_size")) ** 0.5,
    }


class SandwichBlock(Block):
    """Norms before and after attention and MLP, residuals around all of it."""

    @nn.compact
    def __call__(
        self, residual: Residual, cos: jax.Array, sin: jax.Array, context: AttentionContext
    ) -> tuple[Residual, AttentionContext]:
        """See `Block.__call__`."""
        x, y = self.add_norm("attn_norm", residual, context)
        delta, context = self.attention()(y, cos, sin, context)
        x, y = self.add_norm("mlp_norm", Residual(x, delta, self.norm_weight("attn_post_norm")), context)
        return Residual(x, self.mlp()(y), self.norm_weight("mlp_post_norm")), context


class Gemma2(Decoder):
    """A stack of `SandwichBlock`."""

    block: ClassVar[type[Block]] = SandwichBlock


def table(config: ModelConfig) -> CheckpointTable:
    """Hugging Face's names."""
    return decoder_table(config, norms=NORMS)
