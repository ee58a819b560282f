"""add_rms_norm for NVIDIA GPUs, in Pallas by way of Triton: one launch where XLA makes two."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.padding import power_of_two


def _kernel(x: Any, residual: Any, weight: Any, total: Any, normed: Any, *, eps: float, offset: float) -> None:
    """Program (token): its D numbers stay in registers between the sum of their squares and their scaling."""
    token, dims = pl.program_id(0), x.shape[1]
    index = jnp.arange(power_of_two(dims))
    real = index < dims
    read = functools.partial(pltriton.load, mask=real, other=0.0)
    s = (read(x.at[token, index]).astype(jnp.float32) + read(residual.at[token, index]).astype(jnp.float32)).astype(
        total.dtype
    )
    pltriton.store(total.at[token, index], s, mask=real)
    y = s.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.sum(y * y) / dims + eps)
    scale = read(weight.at[index]).astype(jnp.float32) + offset
    pltriton.store(normed.at[token, index], (y * scale).astype(normed.dtype), mask=real)


@functools.partial(jax.jit, static_argnames=("eps", "offset", "interpret"))
def add_rms_norm(
    x: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float, offset: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.add_rms_norm.api`; the arguments are taken as checked."""
    tokens, dims = x.shape
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    warps = min(16, max(1, power_of_two(dims) // 512))  # 16 numbers per thread
    return pl.pallas_call(
        functools.partial(_kernel, eps=eps, offset=offset),
        out_shape=(out, out),
        grid=(tokens,),
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="add_rms_norm",
    )(x, residual, weight)
