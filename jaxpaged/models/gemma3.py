"""Gemma 3, text: Gemma 2's blocks with query and key norms, no soft caps, and two rotary embeddings.

`model_type` is "gemma3_text" for a text model, and "gemma3" for one with vision, whose text half is `text_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpaged.checkpoint.table import CheckpointTable
from jaxpaged.errors import ModelError, UnsupportedError
from jaxpaged.layers.rope import RopeConfig, rope_from_hf
from jaxpaged.models import gemma2
from jaxpaged.models.config import (
    ModelConfig,
    fill_defaults,
    layer_count,
    layer_windows,
    read_config,
    refuse_unsupported,
)
from jaxpaged.models.hf_names import decoder_table

Gemma3 = gemma2.Gemma2

# Published configs of models with vision leave out of `text_config` all that equals these.
_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
}
_VISION = (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")
_NESTED = "language_model."


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Every sixth layer is global unless the config says otherwise; global and local layers rotate differently."""
    prefix = ""
    if hf.get("model_type") == "gemma3":
        refuse_unsupported(hf)
        text = hf.get("text_config")
        if not isinstance(text, Mapping):
            raise ModelError(f"config.json of model_type 'gemma3' needs an object 'text_config', not {text!r}")
        hf = {"tie_word_embeddings": hf.get("tie_word_embeddings", True), **text, "model_type": "gemma3"}
        prefix = _NESTED
    hf = fill_defaults(hf, _DEFAULTS)
    if hf.get("attn_logit_softcapping"):
        raise UnsupportedError(f"attn_logit_softcapping={hf['attn_logit_softcapping']!r}: Gemma 3 has no such cap")
    pattern = hf.get("sliding_window_pattern") or 6
    types = hf.get("layer_types") or [
        "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layer_count(hf))
    ]
    return read_config(
        hf,
        sliding_windows=layer_windows(hf, types, hf.get("sliding_window", 4096)),
        ropes=_ropes(hf),
        rope_of_layer=tuple(int(kind == "sliding_attention") for kind in types),
        qk_norm="head",
        final_soft_cap=hf.get("final_logit_softcapping"),
        checkpoint_prefix=prefix,
        **gemma2.gemma_facts(hf),
    )


def table(config: ModelConfig) -> CheckpointTable:
    """Hugging Face's names; a model with vision keeps its text weights under "language_model."."""
    return decoder_table(config, norms=gemma2.NORMS, ignored=_VISION if config.checkpoint_prefix else ())


def _ropes(hf: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """(global, local). Before transformers 5, `rope_scaling` was for the global layers alone."""
    given = hf.get("rope_parameters") or {}
    full = dict(given.get("full_attention") or {})
    full.update(hf.get("rope_scaling") or {})
    full.setdefault("rope_theta", hf.get("rope_theta") or 1_000_000.0)
    local = dict(given.get("sliding_attention") or {})
    local.setdefault("rope_theta", hf.get("rope_local_base_freq") or 10_000.0)
    sizes = {"head_dim": hf["head_dim"], "max_position_embeddings": hf["max_position_embeddings"]}
    return rope_from_hf(hf, parameters=full, **sizes), rope_from_hf(hf, parameters=local, **sizes)
