"""Products with weights stored as in Hugging Face checkpoints: [out..., in]."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def project(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, dtype: Any = None) -> jax.Array:
    """x [T, D] times weight [out..., D], plus bias [out...]: [T, out...].

    The contraction runs over the last axis of both, so no weight is ever transposed. Sums are taken in float32 by
    the hardware; asking for a float32 result and rounding it afterwards made XLA:CPU up to 1.5 times slower in
    bfloat16, so the result has x's dtype unless `dtype` says otherwise. Float32 is never cut to TF32.
    """
    y = lax.dot_general(
        x,
        weight.reshape(-1, weight.shape[-1]),  # XLA:CPU copies a weight of more than two axes into another order
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=dtype,
    )
    y = y.reshape(*x.shape[:-1], *weight.shape[:-1])
    return y if bias is None else y + bias
