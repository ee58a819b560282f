"""Products with weights stored as in Hugging Face checkpoints: [out..., in]."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# On CPU, a float32 product of this many rows is quicker with the weight as the left operand (measured on AVX2 with 2 to
# 32 rows: 1.2 to 1.8 times, with 64 rows 1.2 times; with 1 or 96 rows there is no difference, 128 are slower).
_FEW_ROWS = range(2, 65)
_BLOCK = 64


def project(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, dtype: Any = None) -> jax.Array:
    """x [..., D] times weight [out..., D], plus bias [out...]: [..., out...].

    The contraction runs over the last axis of both, so no weight is ever transposed. Sums are taken in float32 by
    the hardware; asking for a float32 result and rounding it afterwards made XLA:CPU up to 1.5 times slower in
    bfloat16, so the result has x's dtype unless `dtype` says otherwise. Float32 is never cut to TF32.
    """
    flat = weight.reshape(-1, weight.shape[-1])  # XLA:CPU copies a weight of more than two axes into another order
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) in _FEW_ROWS and x.dtype == weight.dtype == jnp.float32:
        y = lax.platform_dependent(rows, flat, cpu=_weight_times_rows, default=_rows_times_weight)
    else:
        y = _rows_times_weight(rows, flat, dtype)
    y = y.reshape(*x.shape[:-1], *weight.shape[:-1])
    return y if bias is None else y + bias


def _rows_times_weight(x: jax.Array, weight: jax.Array, dtype: Any = None) -> jax.Array:
    """[T, D] times [N, D]: [T, N]."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=dtype)


def _weight_times_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same, as [N, D] times [T, D] and a transposition; in blocks of N, or XLA would swap the operands back."""
    size = math.gcd(weight.shape[0], _BLOCK)
    blocks = weight.reshape(-1, size, weight.shape[1])
    y = lax.dot_general(blocks, x, (((2,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    return y.transpose(2, 0, 1).reshape(x.shape[0], weight.shape[0])
