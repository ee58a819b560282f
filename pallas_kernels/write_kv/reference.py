"""The specification of write_kv."""

import jax
import jax.numpy as jnp

from pallas_kernels.pool import to_storage
from pallas_kernels.write_kv.head_norm import HeadNorm


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [T, ..., H] with its first R dimensions turned by the angles of cos, sin f32[T, R/2]; float32."""
    half = cos.shape[1]
    x = x.astype(jnp.float32)
    cos, sin = (jnp.expand_dims(a, range(1, x.ndim - 1)) for a in (cos, sin))
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def write_kv(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    kv_pages: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    head_norm: HeadNorm | None,
    k_scale: float | jax.Array | None,
    v_scale: float | jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.write_kv.api`; the arguments are taken as checked."""
    qkv = qkv if head_norm is None else head_norm(qkv)
    page_size = kv_pages.shape[2]
    page, slot = slot_mapping // page_size, slot_mapping % page_size
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    keys = to_storage(rotate(k, cos, sin).astype(k.dtype), k_scale, kv_pages.dtype)
    values = to_storage(v, v_scale, kv_pages.dtype)
    kv_pages = kv_pages.at[layer[0], page, slot, 0::2].set(keys)
    kv_pages = kv_pages.at[layer[0], page, slot, 1::2].set(values)
    return rotate(q, cos, sin).astype(q.dtype).reshape(q.shape[0], -1, q.shape[-1]), kv_pages
