"""add_rms_norm for NVIDIA GPUs, in Pallas by way of Triton: one launch where XLA makes two, or three."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.padding import power_of_two


def _kernel(x: Any, delta: Any, *refs: Any, eps: float, offset: float) -> None:
    """Program (token): its D numbers stay in registers between the sums of squares and the scaling.

    Args:
      refs: weight, the weight of delta's own norm if it has one; then what is written: the sum, normed.
    """
    weight, *delta_weight, total, normed = refs
    token, dims = pl.program_id(0), x.shape[1]
    index = jnp.arange(power_of_two(dims))
    real = index < dims

    def read(ref: Any) -> jax.Array:
        return pltriton.load(ref, mask=real, other=0.0).astype(jnp.float32)

    def norm(y: jax.Array, weight: Any) -> jax.Array:
        y = y * lax.rsqrt(jnp.sum(y * y) / dims + eps)
        return (y * (read(weight.at[index]) + offset)).astype(total.dtype)

    d = read(delta.at[token, index])
    if delta_weight:
        d = norm(d, delta_weight[0]).astype(jnp.float32)
    s = (read(x.at[token, index]) + d).astype(total.dtype)
    pltriton.store(total.at[token, index], s, mask=real)
    pltriton.store(normed.at[token, index], norm(s.astype(jnp.float32), weight), mask=real)


@functools.partial(jax.jit, static_argnames=("eps", "offset", "interpret"))
def add_rms_norm(
    x: jax.Array,
    delta: jax.Array,
    weight: jax.Array,
    delta_weight: jax.Array | None,
    *,
    eps: float,
    offset: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.add_rms_norm.api`; the arguments are taken as checked."""
    tokens, dims = x.shape
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    warps = min(16, max(1, power_of_two(dims) // 512))  # 16 numbers per thread
    weights = (weight,) if delta_weight is None else (weight, delta_weight)
    return pl.pallas_call(
        functools.partial(_kernel, eps=eps, offset=offset),
        out_shape=(out, out),
        grid=(tokens,),
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="add_rms_norm",
    )(x, delta, *weights)
