"""The public operation: checks its arguments and calls one of the implementations."""

import jax

from pallas_kernels.checks import (
    check_arrays,
    check_float,
    check_index,
    check_pool,
    check_scale,
    check_shape,
    pick_implementation,
)
from pallas_kernels.debug import check_write
from pallas_kernels.write_kv import gpu, reference, tpu, xla
from pallas_kernels.write_kv.head_norm import HeadNorm

_AVAILABLE = {"reference": reference.write_kv, "xla": xla.write_kv, "gpu": gpu.write_kv, "tpu": tpu.write_kv}


def write_kv(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    kv_pages: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    *,
    head_norm: HeadNorm | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    implementation: str | None = None,
    interpret: bool = False,
    debug: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Turns queries and keys by their rotary angles, and writes keys and values into their slots of one layer's pages.

    All three come in one array, as one product of the hidden states gives them: to cut it apart first would be a copy.
    The rotation pairs dimension i with i + R/2 among the first R dimensions ("rotate half"), in float32; the others
    pass unchanged. R = 0 means no rotary embedding. The pool is written in place where its buffer is donated.

    Args:
      qkv: [T, K, G + 2, H] for each of the K KV heads its G query heads, its key and its value; float32, bfloat16 or
        float16.
      cos, sin: f32[T, R/2] of each token's angles.
      kv_pages: [L, P, page_size, 2K, H] pool; head 2k is the key of KV head k, head 2k+1 its value; dtypes as in
        `ragged_paged_attention`. uint16 holds the bits of bfloat16 (see `pallas_kernels.pool`).
      slot_mapping: i32[T] page * page_size + offset; live tokens have distinct slots. Padding tokens point into page 0,
        which no row reads; what is left there is undefined.
      layer: i32[1] index into L.
      head_norm: RMS norm of each query and key before it is turned.
      k_scale, v_scale: keys are stored divided by k_scale (after the rotation), values by v_scale.
      implementation: "reference", "xla", "gpu", "gpu_hopper", "tpu", or None for the best one here.
      interpret: runs a Pallas implementation on any platform, slowly: for tests.
      debug: also checks what the integer arrays hold, see `pallas_kernels.debug`.

    Returns:
      (rotated queries [T, K * G, H] in the dtype of qkv, the pool).

    Raises:
      ValueError: a shape or dtype is wrong, or with `debug` a slot; the message shows it.
      NotImplementedError: the implementation does not exist, or lacks this case.
    """
    check_arrays(qkv=qkv, cos=cos, sin=sin, kv_pages=kv_pages, slot_mapping=slot_mapping, layer=layer)
    *_, kv_heads, head_dim = check_pool(kv_pages)
    if qkv.ndim != 4 or 0 in qkv.shape or qkv.shape[2] < 3:
        raise ValueError(f"qkv must be [tokens, kv_heads, group + 2, head_dim], got shape {tuple(qkv.shape)}")
    tokens, heads, _, width = qkv.shape
    if (heads, width) != (kv_heads, head_dim):
        raise ValueError(
            f"qkv and kv_pages must have the same kv_heads and head_dim, got {heads, width} and {kv_heads, head_dim}"
        )
    check_float("qkv", qkv)
    if head_norm is not None:
        for name, array in (("head_norm.q", head_norm.q), ("head_norm.k", head_norm.k)):
            check_shape(name, array, (head_dim,))
            check_float(name, array)
    if cos.ndim != 2 or 2 * cos.shape[1] > head_dim:
        raise ValueError(f"cos must be [tokens, at most head_dim / 2 = {head_dim / 2}], got shape {tuple(cos.shape)}")
    for name, array in (("cos", cos), ("sin", sin)):
        check_shape(name, array, (tokens, cos.shape[1]))
        if str(array.dtype) != "float32":
            raise ValueError(f"{name} must be float32, got {array.dtype}")
    check_index("slot_mapping", slot_mapping, (tokens,))
    check_index("layer", layer, (1,))
    if debug:
        check_write(slot_mapping, layer, pool=kv_pages.shape)
    k_scale, v_scale = check_scale("k_scale", k_scale), check_scale("v_scale", v_scale)
    write = pick_implementation("write_kv", implementation, _AVAILABLE, interpret=interpret)
    return write(qkv, cos, sin, kv_pages, slot_mapping, layer, head_norm, k_scale, v_scale)
