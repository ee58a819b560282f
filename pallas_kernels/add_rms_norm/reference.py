"""The specification of add_rms_norm."""

import jax
import jax.numpy as jnp
from jax import lax


def add_rms_norm(
    x: jax.Array, delta: jax.Array, weight: jax.Array, delta_weight: jax.Array | None, *, eps: float, offset: float
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.add_rms_norm.api`; the arguments are taken as checked."""
    if delta_weight is not None:
        delta = _rms_norm(delta, delta_weight, eps, offset)
    total = x + delta
    return total, _rms_norm(total, weight, eps, offset)


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    scale = weight.astype(jnp.float32)
    return (y * (scale + offset if offset else scale)).astype(x.dtype)
