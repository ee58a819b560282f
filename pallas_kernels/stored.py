"""Numbers of the pool inside Pallas kernels for GPUs: into and out of storage, where plain casts will not do.

Triton kills the process rather than cast float8_e4m3fn on a chip before sm_89: there, bits are moved by hand.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tuning

# By name: the chip that a program is compiled for need not be there to be asked.
_CASTS_E4M3 = re.compile(r"\b(H20|H100|H200|H800|GH200|G?B[1-3]00|L4|L20|L40S?|GeForce RTX [45]0\d\d|Ada|Blackwell)\b")


def casts_e4m3(device_kind: str) -> bool:
    """Whether a device has instructions for float8_e4m3fn (sm_89 and later); an unknown one has not."""
    return bool(_CASTS_E4M3.search(device_kind))


def check_addressable(kv_pages: jax.Array) -> None:
    """Raises NotImplementedError for a pool that Pallas would address with too few bits.

    It counts numbers in 32 bits, signed, up to 2^32 bytes, and in 64 bits beyond: with numbers of one byte, those
    between 2^31 and 2^32 have no right offset.
    """
    if kv_pages.dtype.itemsize == 1 and 2**31 < kv_pages.size <= 2**32:
        raise NotImplementedError(
            f"gpu: kv_pages of {kv_pages.dtype} must have at most 2^31 numbers or more than 2^32, got {kv_pages.size}"
        )


def widen(stored: jax.Array, dtype: Any) -> jax.Array:
    """What a tile of the pool means, scales aside, in a float dtype; uint16 holds the bits of bfloat16."""
    if stored.dtype == jnp.uint16:
        stored = lax.bitcast_convert_type(stored, jnp.bfloat16)
    if stored.dtype == jnp.float8_e4m3fn and not casts_e4m3(tuning.current_device()):
        stored = _e4m3_to_float16(stored)
    return stored.astype(dtype)


def narrow(x: jax.Array, dtype: Any) -> jax.Array:
    """A float32 tile in the pool's dtype: `pallas_kernels.pool.to_storage` for kernels, of what is scaled already."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    if dtype == jnp.int8:
        return jnp.clip(_nearest(x), -127, 127).astype(dtype)
    if dtype.itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        x = jnp.where(x != x, x, jnp.clip(x, -limit, limit))  # a NaN stays one
        if dtype == jnp.float8_e4m3fn and not casts_e4m3(tuning.current_device()):
            return _float32_to_e4m3(x)
    return x.astype(dtype)


def _nearest(x: jax.Array) -> jax.Array:
    """The nearest integers, ties to even: Triton rounds down only."""
    low = jnp.floor(x)
    rest, odd = x - low, low - 2 * jnp.floor(low / 2) == 1
    return low + ((rest > 0.5) | ((rest == 0.5) & odd))


def _e4m3_to_float16(stored: jax.Array) -> jax.Array:
    """Exact. Both have a sign and exponent bits first: moved into place, only the bias differs, by 15 - 7 = 8."""
    bits = lax.bitcast_convert_type(stored, jnp.uint8).astype(jnp.uint16)
    moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = lax.bitcast_convert_type(moved, jnp.float16) * jnp.float16(256)
    return jnp.where((bits & 0x7F) == 0x7F, jnp.float16(jnp.nan), value)


def _float32_to_e4m3(x: jax.Array) -> jax.Array:
    """Rounded to nearest, ties to even; |x| <= 448 or NaN."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign, size = (bits >> 24) & 0x80, jnp.abs(x)
    # 3 of 23 mantissa bits are kept: half of the last one is added, less a bit where that one is even.
    normal = (((bits & 0x7FFFFFFF) + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = _nearest(size * 512).astype(jnp.uint32)  # in units of 2^-9; 8 of them are the first normal number
    code = jnp.where(size < 2.0**-6, subnormal, normal)
    code = jnp.where(x != x, jnp.uint32(0x7F), code)
    return lax.bitcast_convert_type((sign | code).astype(jnp.uint8), jnp.float8_e4m3fn)
