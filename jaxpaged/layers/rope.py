"""Rotary position embeddings: every scaling that Hugging Face configs declare.

Frequencies are computed on the host in float64 from the config alone, so they are constants of the compiled step.
Two kinds, "dynamic" and "longrope", depend on the length of a sequence in their papers. In a server that would make
keys already in the cache wrong whenever a sequence grows past the border, and a token's value depend on when it was
computed. So the length is fixed once per engine, as in vLLM: `context_len`, the longest sequence it serves.
That equals Hugging Face for sequences that stay within the original length when context_len does too, and for
longer ones when they are context_len (dynamic) or longer than the original (longrope).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.errors import ModelError

# Types whose original length may stand at the top level of a config (Phi-3), which then wins.
_SCALED_FROM_ORIGINAL = ("llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """One kind of rotary embedding.

    Attributes:
      rotary_dim: R, the leading head dims that are rotated; even.
      theta: base of the geometric series of wavelengths.
      rope_type: a key of `ROPE_TYPES`.
      parameters: what the type needs, as sorted (name, value) pairs, lists as tuples: hashable.
      max_position_embeddings: the config's own.
      context_len: longest sequence that will be served; see the module's docstring.
    """

    rotary_dim: int
    theta: float
    rope_type: str
    parameters: tuple[tuple[str, Any], ...]
    max_position_embeddings: int
    context_len: int

    def get(self, name: str, default: Any = None) -> Any:
        """Parameter `name`, or `default` where it is absent or null."""
        value = dict(self.parameters).get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """Parameter `name`; raises ModelError if it is absent."""
        value = self.get(name)
        if value is None:
            have = sorted(dict(self.parameters))
            raise ModelError(f"rope type {self.rope_type!r} needs {name!r}; the config has {have}")
        return value

    @property
    def max_context_len(self) -> int:
        """Longest sequence that the declared scaling is meant for."""
        if self.rope_type == "dynamic":
            return int(self.max_position_embeddings * self.need("factor"))
        if self.rope_type == "yarn":
            return max(self.max_position_embeddings, int(self.need("original_max_position_embeddings") * _factor(self)))
        return self.max_position_embeddings

    def frequencies(self) -> tuple[np.ndarray, float]:
        """(inverse frequencies float32 [R/2], factor on cos and sin)."""
        inv_freq, attention_factor = ROPE_TYPES[self.rope_type](self)
        return inv_freq.astype(np.float32), float(attention_factor)


def rope_from_hf(
    hf: Mapping[str, Any],
    *,
    head_dim: int,
    max_position_embeddings: int,
    default_theta: float = 10000.0,
    parameters: Mapping[str, Any] | None = None,
) -> RopeConfig:
    """Reads a config's rotary embedding in any of its spellings.

    Args:
      hf: content of config.json. Read are `rope_scaling` (before transformers 5) or `rope_parameters`, in them
        "rope_type" or "type", and at the top level `rope_theta`, `partial_rotary_factor` and
        `original_max_position_embeddings`.
      parameters: take these instead of `rope_scaling` / `rope_parameters` (a model with several kinds).

    Raises ModelError for an unknown type or a missing parameter.
    """
    if parameters is None:
        parameters = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ModelError(f"rope parameters must be an object, not {parameters!r}")
    found = {name: value for name, value in parameters.items() if value is not None}
    kind = found.pop("rope_type", None) or found.get("type") or "default"
    found.pop("type", None)
    if kind not in ROPE_TYPES:
        raise ModelError(f"unknown rope type {kind!r}; known: {', '.join(sorted(ROPE_TYPES))}")
    theta = found.pop("rope_theta", None) or hf.get("rope_theta") or default_theta
    partial = found.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or 1.0
    if kind in _SCALED_FROM_ORIGINAL:
        original = hf.get("original_max_position_embeddings") or found.get("original_max_position_embeddings")
        found["original_max_position_embeddings"] = original or max_position_embeddings
    rope = RopeConfig(
        rotary_dim=int(head_dim * partial),
        theta=float(theta),
        rope_type=kind,
        parameters=tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in found.items())),
        max_position_embeddings=max_position_embeddings,
        context_len=max_position_embeddings,
    )
    if rope.rotary_dim <= 0 or rope.rotary_dim % 2:
        raise ModelError(f"rotary dims {rope.rotary_dim} (head_dim {head_dim} x {partial}) must be even and positive")
    rope.frequencies()  # a missing parameter is an error now, not in the first step
    return rope


def with_context_len(rope: RopeConfig, context_len: int) -> RopeConfig:
    """The same embedding for an engine whose longest sequence is `context_len`."""
    return dataclasses.replace(rope, context_len=context_len)


def rope_angles(rope: RopeConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each float32 [T, R/2], at positions i32[T]; the attention factor is in both."""
    inv_freq, attention_factor = rope.frequencies()
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inv_freq)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if attention_factor == 1.0 else (cos * attention_factor, sin * attention_factor)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first R dims of x [T, heads, H] by cos, sin [T, R/2]; dim i pairs with dim i + R/2."""
    half = cos.shape[-1]
    y = x.astype(jnp.float32)
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = y[..., :half], y[..., half : 2 * half]
    rotated = [first * cos - second * sin, second * cos + first * sin, y[..., 2 * half :]]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _inverse(rope: RopeConfig, theta: float | None = None) -> np.ndarray:
    """1 / theta^(2i/R), float64 [R/2]."""
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    return 1.0 / (rope.theta if theta is None else theta) ** exponent


def _factor(rope: RopeConfig) -> float:
    """The declared scaling factor, or the ratio of the lengths."""
    ratio = rope.max_position_embeddings / rope.need("original_max_position_embeddings")
    return float(rope.get("factor", ratio))


def _default(rope: RopeConfig) -> tuple[np.ndarray, float]:
    return _inverse(rope), 1.0


def _linear(rope: RopeConfig) -> tuple[np.ndarray, float]:
    return _inverse(rope) / rope.need("factor"), 1.0


def _dynamic(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """NTK-aware: the base grows with the length beyond `max_position_embeddings`."""
    factor, dim = rope.need("factor"), rope.rotary_dim
    length = max(rope.context_len, rope.max_position_embeddings)
    grown = (factor * length / rope.max_position_embeddings - (factor - 1)) ** (dim / (dim - 2))
    return _inverse(rope, rope.theta * grown), 1.0


def _llama3(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    factor, low, high = rope.need("factor"), rope.need("low_freq_factor"), rope.need("high_freq_factor")
    original = rope.need("original_max_position_embeddings")
    inv_freq = _inverse(rope)
    turns = original * inv_freq / (2 * math.pi)  # full turns within the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq, 1.0


def _yarn(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """https://arxiv.org/abs/2309.00071: interpolates dims that turn less than beta_slow times, keeps the fast ones."""
    dim, factor = rope.rotary_dim, _factor(rope)
    original = rope.need("original_max_position_embeddings")

    def dim_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.get("beta_fast") or 32), dim_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    inv_freq = _inverse(rope)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), rope.get("attention_factor", _yarn_attention(rope, factor))


def _yarn_attention(rope: RopeConfig, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = rope.get("mscale"), rope.get("mscale_all_dim")
    return mscale(numerator) / mscale(denominator) if numerator and denominator else mscale(1.0)


def _longrope(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """https://arxiv.org/abs/2402.13753: searched factors per dim, one list up to the original length, one beyond."""
    original = rope.need("original_max_position_embeddings")
    lists = {name: np.asarray(rope.need(name), np.float64) for name in ("short_factor", "long_factor")}
    for name, factors in lists.items():
        if factors.shape != (rope.rotary_dim // 2,):
            raise ModelError(f"rope {name!r} has {factors.size} entries, expected {rope.rotary_dim // 2}")
    factors = lists["long_factor" if rope.context_len > original else "short_factor"]
    factor = _factor(rope)
    default = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return _inverse(rope) / factors, rope.get("attention_factor", default)


ROPE_TYPES: dict[str, Callable[[RopeConfig], tuple[np.ndarray, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""Hugging Face's `rope_type` -> the function that computes (inverse frequencies, attention factor)."""
