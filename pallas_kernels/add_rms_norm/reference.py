"""The specification of add_rms_norm."""

import jax
import jax.numpy as jnp
from jax import lax


def add_rms_norm(
    x: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float, offset: float
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.add_rms_norm.api`; the arguments are taken as checked."""
    total = x + residual
    y = total.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    scale = weight.astype(jnp.float32)
    return total, (y * (scale + offset if offset else scale)).astype(x.dtype)
