"""The public operation: checks its arguments and calls one of the implementations."""

import jax

from pallas_kernels.checks import check_float, check_index, check_packed, check_pool, check_shape, pick_implementation
from pallas_kernels.write_kv import reference, xla

_AVAILABLE = {"reference": reference.write_kv, "xla": xla.write_kv}


def write_kv(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    kv_pages: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    *,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Turns queries and keys by their rotary angles, and writes keys and values into their slots of one layer's pages.

    The rotation pairs dimension i with i + R/2 among the first R dimensions ("rotate half"), in float32; the others
    pass unchanged. R = 0 means no rotary embedding. The pool is written in place where its buffer is donated.

    Args:
      q: [T, N, H] queries; k, v: [T, K, H] keys and values, in the dtype of q.
      cos, sin: f32[T, R/2] of each token's angles.
      kv_pages: [L, P, page_size, 2K, H] pool; head 2k is the key of KV head k, head 2k+1 its value; dtypes as in
        `ragged_paged_attention`. uint16 holds the bits of bfloat16 (see `pallas_kernels.pool`).
      slot_mapping: i32[T] page * page_size + offset; live tokens have distinct slots. Padding tokens point into page 0,
        which no row reads; what is left there is undefined.
      layer: i32[1] index into L.
      k_scale, v_scale: keys are stored divided by k_scale (after the rotation), values by v_scale.
      implementation: "reference", "xla", "gpu", "gpu_hopper", "tpu", or None for the best one here.

    Returns:
      (rotated q [T, N, H] in its dtype, the pool).

    Raises:
      ValueError: a shape or dtype is wrong; the message shows it.
      NotImplementedError: the implementation does not exist yet.
    """
    tokens, _, head_dim = check_packed("q", q)
    *_, kv_heads, pool_head_dim = check_pool(kv_pages)
    if head_dim != pool_head_dim:
        raise ValueError(f"q and kv_pages must have the same head_dim, got {head_dim} and {pool_head_dim}")
    for name, array in (("k", k), ("v", v)):
        check_shape(name, array, (tokens, kv_heads, head_dim))
        check_float(name, array)
        if array.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {array.dtype}")
    if cos.ndim != 2 or 2 * cos.shape[1] > head_dim:
        raise ValueError(f"cos must be [tokens, at most head_dim / 2 = {head_dim / 2}], got shape {tuple(cos.shape)}")
    for name, array in (("cos", cos), ("sin", sin)):
        check_shape(name, array, (tokens, cos.shape[1]))
        if str(array.dtype) != "float32":
            raise ValueError(f"{name} must be float32, got {array.dtype}")
    check_index("slot_mapping", slot_mapping, (tokens,))
    check_index("layer", layer, (1,))
    write = pick_implementation("write_kv", implementation, _AVAILABLE)
    return write(q, k, v, cos, sin, kv_pages, slot_mapping, layer, k_scale, v_scale)
