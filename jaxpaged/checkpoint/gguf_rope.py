"""Rope scaling of a GGUF file as `rope_scaling` of config.json: from metadata, or from tensors that stand for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxpaged.checkpoint.gguf_file import ArchitectureMetadata
from jaxpaged.errors import CheckpointError, UnsupportedError

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def rope_scaling(reader: ArchitectureMetadata) -> dict[str, Any] | None:
    """`rope_scaling` as in config.json, from metadata or from the tensors that llama.cpp keeps it in."""
    kind = reader.get("rope.scaling.type", "none")
    factor = reader.get("rope.scaling.factor", reader.get("rope.scale_linear"))
    original = reader.get("rope.scaling.original_context_length")
    if reader.vector("rope_freqs.weight") is not None:
        return _llama3_scaling(reader)
    if reader.vector("rope_factors_long.weight") is not None or kind == "longrope":
        return _longrope_scaling(reader)
    if kind == "none" and reader.get("rope.scale_linear", 1.0) == 1.0:
        return None
    if kind == "yarn":
        return _yarn_scaling(reader, factor, original)
    if kind in ("linear", "none"):
        return None if factor in (None, 1.0) else {"rope_type": "linear", "factor": factor}
    raise UnsupportedError(f"{reader.file.path}: rope scaling {kind!r}")


def _yarn_scaling(reader: ArchitectureMetadata, factor: float | None, original: int | None) -> dict[str, Any]:
    if factor is None or original is None:
        raise CheckpointError(f"{reader.file.path}: yarn needs rope.scaling.factor and .original_context_length")
    for key, neutral in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if reader.get(f"rope.scaling.{key}", neutral) not in (neutral, -1.0):
            raise UnsupportedError(f"{reader.file.path}: rope.scaling.{key}={reader.get(f'rope.scaling.{key}')}")
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if reader.get(f"rope.scaling.{theirs}") is not None:
            scaling[ours] = reader.get(f"rope.scaling.{theirs}")
    attention = reader.get("rope.scaling.yarn_attn_factor", reader.get("rope.scaling.attn_factor", 1.0))
    if attention != 1.0:  # llama.cpp's is a factor on top of yarn's own, Hugging Face's replaces it
        scaling["attention_factor"] = attention * (1.0 + 0.1 * math.log(factor))
    return scaling


def _longrope_scaling(reader: ArchitectureMetadata) -> dict[str, Any]:
    long, short = reader.vector("rope_factors_long.weight"), reader.vector("rope_factors_short.weight")
    if long is None or short is None:
        absent = [n for n, v in (("rope_factors_long.weight", long), ("rope_factors_short.weight", short)) if v is None]
        raise CheckpointError(f"{reader.file.path}: longrope", missing=absent)
    return {"rope_type": "longrope", "type": "longrope", "long_factor": long, "short_factor": short}


def _llama3_scaling(reader: ArchitectureMetadata) -> dict[str, Any]:
    """The parameters of Llama 3's rope, found back from the divisors of each frequency that GGUF stores.

    Only the settings that Llama 3.1 to 3.3 use are tried; another set is refused.
    """
    divisors = np.asarray(reader.vector("rope_freqs.weight"), np.float64)
    dim = 2 * len(divisors)
    wavelen = 2 * math.pi * reader.get("rope.freq_base", 10000.0) ** (np.arange(0, dim, 2) / dim)
    factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
    smooth = np.clip((original / wavelen - low) / (high - low), 0.0, 1.0)
    if not np.allclose(divisors, 1.0 / ((1.0 - smooth) / factor + smooth), rtol=1e-4):
        raise UnsupportedError(f"{reader.file.path}: rope_freqs.weight is not a Llama 3 scaling over {original} tokens")
    if factor == 1.0:
        return {"rope_type": "default"}
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
