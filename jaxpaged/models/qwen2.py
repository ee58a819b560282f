"""Qwen2 and Qwen2.5: Llama's blocks with biases on q, k and v, and windows on the upper layers if asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig, layer_count, layer_windows, read_config

Qwen2 = llama.Llama
table = llama.table


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """q, k and v have biases always, the output projection never."""
    return read_config(hf, qkv_bias=True, sliding_windows=sliding_windows(hf))


def sliding_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Windows count only with `use_sliding_window`, and then from layer `max_window_layers` on, or by `layer_types`."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    first, layers = hf.get("max_window_layers", 28), layer_count(hf)
    types = hf.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return layer_windows(hf, types, window)
