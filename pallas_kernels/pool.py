"""How the KV pool stores numbers: its dtypes, and the ways in and out of them."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def storage_dtype(dtype: DTypeLike, platform: str | None = None) -> jnp.dtype:
    """The dtype in which a pool of `dtype` is best kept on a platform.

    On CPU, bfloat16 is kept as its bits, in uint16: XLA:CPU updates a bfloat16 array by widening all of it to float32
    and back, however few numbers change, while it updates uint16 in place. Every operation takes both, and a page has
    the same bytes in both. (It widens float8 too; int8, float16 and float32 it does not.)

    Args:
      dtype: what the numbers are.
      platform: as `jax.default_backend()` names it; None means that one.
    """
    dtype = jnp.dtype(dtype)
    if (platform or jax.default_backend()) == "cpu" and dtype == jnp.bfloat16:
        return jnp.dtype(jnp.uint16)
    return dtype


def to_float32(stored: jax.Array) -> jax.Array:
    """What the pool's numbers mean, scales aside; uint16 holds the bits of bfloat16."""
    if stored.dtype == jnp.uint16:
        return lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)
    return stored.astype(jnp.float32)


def to_storage(x: jax.Array, scale: float | jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """x / scale in the pool's dtype; int8 and float8 are rounded to nearest and held within their range."""
    dtype = jnp.dtype(dtype)
    if scale is not None:
        x = x.astype(jnp.float32) / scale
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(x.astype(jnp.float32)), -127, 127).astype(dtype)
    if dtype.itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        return jnp.clip(x.astype(jnp.float32), -limit, limit).astype(dtype)
    return x.astype(dtype)
