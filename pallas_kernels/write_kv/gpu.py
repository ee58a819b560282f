"""write_kv for NVIDIA GPUs, in Pallas by way of Triton: one launch that rotates, quantizes and writes.

A program takes some tokens of one KV head. The rows of its tile are (token, part) pairs, where the parts are the head's
queries, its key and its value, as they lie in memory: all are turned alike, except that the angles of a value are zero.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.padding import power_of_two
from pallas_kernels.stored import narrow

_ROWS = 16  # (token, part) pairs per program, at least


class _Refs(NamedTuple):
    """The arrays of the launch.

    Attributes:
      qkv: [T, K, G + 2, H].
      cos, sin: f32[T, R/2].
      slots, layer: i32[T], i32[1].
      scales: f32[2], by which keys and values are divided.
      pool_in, pool: [L * P * page_size, 2K, H], the same memory.
      q: [T, N, H].
    """

    qkv: Any
    cos: Any
    sin: Any
    slots: Any
    layer: Any
    scales: Any
    pool_in: Any
    q: Any
    pool: Any


class _Rows(NamedTuple):
    """The rows of a tile, each i32[X] or bool[X].

    Attributes:
      token, part: what a row is.
      head: the query head that it goes to, beyond the last for keys and values.
      slot, pool_head: where in the pool it goes, beyond the last slot for queries.
      live: the others are padding.
    """

    token: jax.Array
    part: jax.Array
    head: jax.Array
    slot: jax.Array
    pool_head: jax.Array
    live: jax.Array


@dataclass(frozen=True)
class _Write:
    """What is static in the launch.

    Attributes:
      group, half: G, R/2.
      tokens_per_program: of a tile.
      slots_per_layer: P * page_size.
      scaled: whether the scales count.
    """

    group: int
    half: int
    tokens_per_program: int
    slots_per_layer: int
    scaled: bool

    def __call__(self, *arrays: Any) -> None:
        """Program (tile of tokens, KV head)."""
        refs = _Refs(*arrays)
        kv_head = pl.program_id(1)
        rows = self._rows(refs, kv_head)
        head_dim, half = refs.qkv.shape[3], self.half
        if half:
            dims, first = _load(refs, rows, kv_head, 0, half)
            _, second = _load(refs, rows, kv_head, half, half)
            angles = refs.cos.at[rows.token[:, None], dims[None, :]], refs.sin.at[rows.token[:, None], dims[None, :]]
            turned = (rows.live & (rows.part <= self.group))[:, None] & (dims < half)[None, :]
            cos = pltriton.load(angles[0], mask=turned, other=1.0)
            sin = pltriton.load(angles[1], mask=turned, other=0.0)
            self._store(refs, rows, dims, half, 0, first * cos - second * sin)
            self._store(refs, rows, dims, half, half, second * cos + first * sin)
        if 2 * half < head_dim:
            dims, rest = _load(refs, rows, kv_head, 2 * half, head_dim - 2 * half)
            self._store(refs, rows, dims, head_dim - 2 * half, 2 * half, rest)

    def _rows(self, refs: _Refs, kv_head: jax.Array) -> _Rows:
        parts = self.group + 2
        pair = jnp.arange(power_of_two(self.tokens_per_program * parts))
        token, part = pl.program_id(0) * self.tokens_per_program + pair // parts, pair % parts
        live = (pair < self.tokens_per_program * parts) & (token < refs.qkv.shape[0])
        is_query = part < self.group
        slot = refs.layer[0] * self.slots_per_layer + pltriton.load(refs.slots.at[token], mask=live, other=0)
        return _Rows(
            token,
            part,
            jnp.where(is_query, kv_head * self.group + part, refs.q.shape[1]),
            jnp.where(is_query, refs.pool.shape[0], slot),
            2 * kv_head + jnp.where(is_query, 0, part - self.group),
            live,
        )

    def _store(self, refs: _Refs, rows: _Rows, dims: jax.Array, count: int, first: int, x: jax.Array) -> None:
        """Puts the dims from `first` on of all rows where they belong; x is f32[X, count padded]."""
        x = x.astype(refs.q.dtype)
        is_query = rows.part < self.group
        at = first + dims[None, :]
        real = (dims < count)[None, :]
        q = refs.q.at[rows.token[:, None], rows.head[:, None], at]
        pltriton.store(q, x, mask=(rows.live & is_query)[:, None] & real)
        stored = x.astype(jnp.float32)
        if self.scaled:
            stored /= jnp.where(rows.part == self.group, refs.scales[0], refs.scales[1])[:, None]
        pool = refs.pool.at[rows.slot[:, None], rows.pool_head[:, None], at]
        pltriton.store(pool, narrow(stored, refs.pool.dtype), mask=(rows.live & ~is_query)[:, None] & real)


def _load(refs: _Refs, rows: _Rows, kv_head: jax.Array, first: int, count: int) -> tuple[jax.Array, jax.Array]:
    """i32[D] offsets of `count` dims, padded to a power of two, and these dims of all rows f32[X, D]."""
    dims = jnp.arange(power_of_two(count))
    index = refs.qkv.at[rows.token[:, None], kv_head, rows.part[:, None], first + dims[None, :]]
    mask = rows.live[:, None] & (dims < count)[None, :]
    return dims, pltriton.load(index, mask=mask, other=0.0).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames="interpret")
def write_kv(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    kv_pages: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    k_scale: float | jax.Array | None,
    v_scale: float | jax.Array | None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.write_kv.api`; the arguments are taken as checked."""
    tokens, kv_heads, parts, head_dim = qkv.shape
    _, pages, page_size, heads, _ = kv_pages.shape
    per_program = max(1, _ROWS // parts)
    scaled = k_scale is not None or v_scale is not None
    scales = jnp.stack([jnp.asarray(1.0 if s is None else s, jnp.float32).reshape(()) for s in (k_scale, v_scale)])
    pool = kv_pages.reshape(-1, heads, head_dim)
    half = cos.shape[1]
    if not half:  # Pallas takes no empty arrays
        cos = sin = jnp.zeros((1, 1), jnp.float32)
    q, pool = pl.pallas_call(
        _Write(parts - 2, half, per_program, pages * page_size, scaled),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, kv_heads * (parts - 2), head_dim), qkv.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ),
        grid=(pl.cdiv(tokens, per_program), kv_heads),
        input_output_aliases={6: 1},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="write_kv",
    )(qkv, cos, sin, slot_mapping, layer, scales, pool)
    return q, pool.reshape(kv_pages.shape)
