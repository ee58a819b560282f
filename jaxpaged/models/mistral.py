"""Mistral: Llama's blocks, one sliding window for all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig, layer_count, read_config

Mistral = llama.Llama
table = llama.table


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """A null `sliding_window` means none; an absent one means 4096, as in Hugging Face. `layer_types` is not read."""
    return read_config(hf, sliding_windows=(hf.get("sliding_window", 4096),) * layer_count(hf))
