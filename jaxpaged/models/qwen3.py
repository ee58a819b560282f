"""Qwen3: Llama's blocks with an RMS norm on every query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpaged.models import llama, qwen2
from jaxpaged.models.config import ModelConfig, fill_defaults, read_config

Qwen3 = llama.Llama
table = llama.table


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """`head_dim` is 128 unless given, whatever the hidden size; `attention_bias` is on all four projections."""
    bias = bool(hf.get("attention_bias", False))
    return read_config(
        fill_defaults(hf, {"head_dim": 128}),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        sliding_windows=qwen2.sliding_windows(hf),
    )
