"""write_kv in plain XLA operations: one scatter of keys and values together, in place."""

import jax
import jax.numpy as jnp

from pallas_kernels.pool import to_storage
from pallas_kernels.write_kv.head_norm import HeadNorm
from pallas_kernels.write_kv.reference import rotate


@jax.jit
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
    layers, pages, page_size, heads, head_dim = kv_pages.shape
    q, k, v = qkv[:, :, :-2].reshape(qkv.shape[0], -1, head_dim), qkv[:, :, -2], qkv[:, :, -1]
    keys = to_storage(rotate(k, cos, sin).astype(k.dtype), k_scale, kv_pages.dtype)
    values = to_storage(v, v_scale, kv_pages.dtype)
    kv = jnp.stack([keys, values], axis=2).reshape(-1, heads, head_dim)
    slots = kv_pages.reshape(layers * pages * page_size, heads, head_dim)
    index = layer[0] * (pages * page_size) + slot_mapping
    if len(index) == 1:  # XLA:CPU rewrites a scatter of one row into something that copies the pool: write it twice
        index, kv = jnp.concatenate([index, index]), jnp.concatenate([kv, kv])
    slots = slots.at[index].set(kv, mode="promise_in_bounds", wrap_negative_indices=False)
    return rotate(q, cos, sin).astype(q.dtype), slots.reshape(kv_pages.shape)
