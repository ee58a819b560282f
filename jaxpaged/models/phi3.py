"""Phi-3, Phi-3.5 and Phi-4-mini: Llama's blocks, fused projections in the checkpoint, longrope, partial rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpaged.checkpoint.table import CheckpointTable
from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig, fill_defaults, layer_count, read_config
from jaxpaged.models.hf_names import decoder_table

Phi3 = llama.Llama

_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
_LONGROPE_NAMES = ("su", "yarn")  # what early Phi-3 configs called longrope


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """One sliding window for all layers, if any; eps is 1e-5 unless given."""
    hf = fill_defaults(hf, _DEFAULTS)
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = hf.get(name)
    if isinstance(rope, Mapping) and (rope.get("rope_type") or rope.get("type")) in _LONGROPE_NAMES:
        hf[name] = {**rope, "rope_type": "longrope"}
    return read_config(hf, sliding_windows=(hf.get("sliding_window"),) * layer_count(hf))


def table(config: ModelConfig) -> CheckpointTable:
    """The checkpoint holds `qkv_proj` and `gate_up_proj`."""
    return decoder_table(config, fused=True)
