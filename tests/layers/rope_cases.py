"""Rope configs of every type, in the spellings that published checkpoints use, and where Hugging Face's answers lie."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GOLDENS = Path(__file__).parent / "goldens" / "rope.json"


@dataclass(frozen=True)
class RopeCase:
    """One rotary embedding.

    Attributes:
      rope: `rope_scaling` of a config.json.
      max_position_embeddings, head_dim, theta: of the config.
      partial: its `partial_rotary_factor`.
      lengths: sequence lengths that Hugging Face is asked with; its frequencies may depend on them.
    """

    rope: dict[str, Any] | None
    max_position_embeddings: int = 8192
    head_dim: int = 64
    theta: float = 10000.0
    partial: float = 1.0
    lengths: tuple[int, ...] = (100,)


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SHORT = [round(1 + 0.05 * i, 2) for i in range(24)]
_LONG = [round(1.2**i, 4) for i in range(24)]
_LONGROPE = {"short_factor": _SHORT, "long_factor": _LONG, "original_max_position_embeddings": 4096}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}

CASES: dict[str, RopeCase] = {
    "default": RopeCase(None, theta=100000.0),
    "linear": RopeCase({"type": "linear", "factor": 8.0}),
    "linear_partial": RopeCase({"rope_type": "linear", "factor": 2.5}, partial=0.5),
    "dynamic": RopeCase({"type": "dynamic", "factor": 2.0}, 2048, lengths=(100, 2048, 3000, 4096)),
    "llama3": RopeCase(_LLAMA3, 131072, theta=500000.0),
    "llama3_wide": RopeCase({**_LLAMA3, "factor": 8.0}, 131072, head_dim=128, theta=500000.0),
    "yarn": RopeCase({"type": "yarn", **_YARN}, 131072, theta=1000000.0, head_dim=128),
    "yarn_inferred_original": RopeCase({"rope_type": "yarn", "factor": 4.0}, 4096),
    "yarn_betas": RopeCase({"rope_type": "yarn", **_YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}, 131072),
    "yarn_attention": RopeCase({"rope_type": "yarn", **_YARN, "attention_factor": 1.7}, 131072),
    "yarn_mscale": RopeCase({"rope_type": "yarn", **_YARN, "mscale": 0.707, "mscale_all_dim": 1.0}, 131072),
    "longrope": RopeCase({"type": "longrope", **_LONGROPE}, 131072, partial=0.75, lengths=(100, 4096, 4097, 131072)),
    "longrope_attention": RopeCase(
        {"rope_type": "longrope", **_LONGROPE, "attention_factor": 1.25, "factor": 16.0},
        131072,
        partial=0.75,
        lengths=(100, 5000),
    ),
}


def read_goldens() -> dict[str, dict[int, tuple[np.ndarray, float]]]:
    """Case -> length -> (inverse frequencies float32 [R/2], attention factor)."""
    stored = json.loads(GOLDENS.read_text())
    return {
        name: {int(length): (np.array(inv, np.float32), factor) for length, (inv, factor) in lengths.items()}
        for name, lengths in stored.items()
    }
