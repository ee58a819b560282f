"""RMS normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from jaxpaged.layers.axes import Axes, declare


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, offset: float = 0.0) -> jax.Array:
    """x / rms(x) * (offset + weight), computed in float32, in x's dtype.

    The mean square is taken over as many trailing axes as `weight` [...] has.
    """
    y = x.astype(jnp.float32)
    axes = tuple(range(-weight.ndim, 0))
    y = y * lax.rsqrt(jnp.mean(y * y, axis=axes, keepdims=True) + eps)
    scale = weight.astype(jnp.float32)
    return (y * (scale + offset if offset else scale)).astype(x.dtype)


def declare_norm(
    module: nn.Module, name: str, shape: Sequence[int], dtype: Any, *, offset: float, axes: Axes = ("embed",)
) -> jax.Array:
    """The weight of a norm that starts as the identity: ones, or zeros where `offset` 1 is added to it (Gemma)."""
    init = nn.initializers.zeros if offset else nn.initializers.ones
    return declare(module, name, shape, axes, dtype, init)
