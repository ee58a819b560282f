"""write_kv for TPUs v5e, v5p, v6e and v7x, in Pallas (Mosaic): one launch that rotates, quantizes and writes.

A step takes some tokens: the pipeline brings their queries, keys and values to VMEM and takes the rotated queries back;
keys and values are laid out as the pool has them, and each token's [2K, H] is copied into its slot while the next step
works. The pool stays in HBM.

Covered: everything but float16 pools, which TPUs do not have. Where 2K is neither 2 (float32, bfloat16), 4 nor a
multiple of 8, or head_dim no multiple of 128, XLA keeps a pool in another order of axes by default and would copy it
for every call: hold it in row-major order then (`jax.experimental.layout`). float16 is computed as float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.pool import to_storage
from pallas_kernels.write_kv.head_norm import HeadNorm

LANES, SUBLANES = 128, 8
TILE_BYTES = 2**20  # of the float32 queries, keys and values of a step's tokens


def _kernel(
    layer,  # i32[1]
    slots,  # i32[T]
    scales,  # f32[2], by which keys and values are divided
    qkv,  # [B, K, G + 2, H]
    angles,  # f32[2, B, H] cosines, and sines with the sign that their partners have
    pool_in,  # the same memory as `pool`
    q,  # [B, K * G, H]
    pool,  # [L, P * page_size, 2K, H]
    staged,  # [2, B, 2K, H]
    sems,  # of each half of `staged`
    *,
    tokens: int,
    half: int,
    scaled: bool,
) -> None:
    del pool_in
    step, steps = pl.program_id(0), pl.num_programs(0)
    size, kv_heads, parts, _ = qkv.shape
    group = parts - 2
    this = step % 2

    def copies(first: jax.Array, stage: jax.Array, *, wait: bool) -> None:
        def copy(i, _):
            transfer = pltpu.make_async_copy(staged.at[stage, i], pool.at[layer[0], slots[first + i]], sems.at[stage])
            transfer.wait() if wait else transfer.start()
            return 0

        lax.fori_loop(0, jnp.minimum(size, tokens - first), copy, 0)

    x = qkv[...]
    turned = _rotate(x[:, :, : group + 1], angles[0], angles[1], half).astype(x.dtype)
    for head in range(kv_heads):
        q[:, head * group : (head + 1) * group, :] = turned[:, head, :group]
        key = to_storage(turned[:, head, group:], scales[0] if scaled else None, pool.dtype)
        value = to_storage(x[:, head, group + 1 :], scales[1] if scaled else None, pool.dtype)
        staged[this, :, 2 * head : 2 * head + 2, :] = jnp.concatenate([key, value], axis=1)
    copies(step * size, this, wait=False)
    pl.when(step > 0)(lambda: copies((step - 1) * size, 1 - this, wait=True))
    pl.when(step == steps - 1)(lambda: copies(step * size, this, wait=True))


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, half: int) -> jax.Array:
    """x [B, K, X, H] with its first 2 * half dimensions turned, in float32; cos, sin f32[B, H], see `_kernel`."""
    x = x.astype(jnp.float32)
    if half == 0:
        return x
    head_dim = x.shape[-1]
    lane = lax.broadcasted_iota(jnp.int32, (1, 1, 1, head_dim), 3)
    if head_dim % LANES:
        rest = [x[..., 2 * half :]] if 2 * half < head_dim else []
        partner = jnp.concatenate([x[..., half : 2 * half], x[..., :half], *rest], axis=-1)
    elif 2 * half == head_dim:
        partner = pltpu.roll(x, half, 3)
    else:
        partner = jnp.where(lane < half, pltpu.roll(x, head_dim - half, 3), pltpu.roll(x, half, 3))
    turned = x * cos[:, None, None] + partner * sin[:, None, None]
    return turned if 2 * half == head_dim else jnp.where(lane < 2 * half, turned, x)


@functools.partial(jax.jit, static_argnames="interpret")
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
    *,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.write_kv.api`; the arguments are taken as checked.

    `interpret` may also be `pltpu.InterpretParams`.
    """
    if kv_pages.dtype == jnp.float16:
        raise NotImplementedError("tpu: there are no float16 kv_pages on TPUs, use bfloat16 or float32")
    qkv = qkv if head_norm is None else head_norm(qkv)  # which XLA fuses
    dtype = qkv.dtype
    if dtype == jnp.float16:
        qkv = qkv.astype(jnp.float32)
    tokens, kv_heads, parts, head_dim = qkv.shape
    half = cos.shape[1]
    rest = jnp.zeros((tokens, head_dim - 2 * half), jnp.float32)
    angles = jnp.stack([jnp.concatenate([cos, cos, rest], axis=1), jnp.concatenate([-sin, sin, rest], axis=1)])
    scaled = not (k_scale is None and v_scale is None)
    scales = jnp.stack([jnp.float32(1) * (1 if scale is None else scale) for scale in (k_scale, v_scale)])

    layers, pages, page_size, heads, _ = kv_pages.shape
    pool = kv_pages.reshape(layers, pages * page_size, heads, head_dim)
    size = _tokens_per_step(tokens, kv_heads * -(-parts // SUBLANES) * SUBLANES * head_dim * 4)
    q_shape = (kv_heads * (parts - 2), head_dim)
    q, pool = pl.pallas_call(
        functools.partial(_kernel, tokens=tokens, half=half, scaled=scaled),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(tokens, size),),
            in_specs=[
                pl.BlockSpec((size, kv_heads, parts, head_dim), lambda i, *_: (i, 0, 0, 0)),
                pl.BlockSpec((2, size, head_dim), lambda i, *_: (0, i, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[
                pl.BlockSpec((size, *q_shape), lambda i, *_: (i, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            scratch_shapes=[
                pltpu.VMEM((2, size, heads, head_dim), kv_pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((tokens, *q_shape), qkv.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={5: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        name="write_kv",
        interpret=interpret,
    )(layer, slot_mapping, scales, qkv, angles, pool)
    return q.astype(dtype), pool.reshape(kv_pages.shape)


def _tokens_per_step(tokens: int, token_bytes: int) -> int:
    """A multiple of SUBLANES, or all tokens."""
    size = max(TILE_BYTES // token_bytes // SUBLANES, 1) * SUBLANES
    return min(size, tokens)
