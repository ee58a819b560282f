"""write_kv for NVIDIA GPUs, in Pallas by way of Triton: one launch that norms, rotates, quantizes and writes.

A program takes some tokens of one KV head. The rows of its tile are (token, part) pairs, where the parts are the head's
queries, its key and its value, as they lie in memory: all are turned alike, except that the angles of a value are zero.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.padding import power_of_two
from pallas_kernels.stored import check_addressable, narrow
from pallas_kernels.write_kv.head_norm import HeadNorm

_ROWS = 16  # (token, part) pairs per program, at least


class _Refs(NamedTuple):
    """The arrays of the launch.

    Attributes:
      qkv: [T, K, G + 2, H].
      cos, sin: f32[T, R/2].
      slots, layer: i32[T], i32[1].
      q_norm, k_norm: [H] weights; [1] where there is no norm.
      scales: f32[2], by which keys and values are divided.
      pool_in, pool: [L * P * page_size, 2K, H], the same memory.
      q: [T, N, H].
    """

    qkv: Any
    cos: Any
    sin: Any
    slots: Any
    layer: Any
    q_norm: Any
    k_norm: Any
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
      eps, offset: of the norm of heads; None and anything where there is none.
      scaled: whether the scales count.
    """

    group: int
    half: int
    tokens_per_program: int
    slots_per_layer: int
    eps: float | None
    offset: float
    scaled: bool

    def __call__(self, *arrays: Any) -> None:
        """Program (tile of tokens, KV head)."""
        refs = _Refs(*arrays)
        kv_head = pl.program_id(1)
        rows = self._rows(refs, kv_head)
        half = self.half
        first, second, rest = self._normed(refs, rows, self._load(refs, rows, kv_head))
        if first is not None and second is not None:
            dims = jnp.arange(first.shape[1])
            angles = refs.cos.at[rows.token[:, None], dims[None, :]], refs.sin.at[rows.token[:, None], dims[None, :]]
            turned = (rows.live & (rows.part <= self.group))[:, None] & (dims < half)[None, :]
            cos = pltriton.load(angles[0], mask=turned, other=1.0)
            sin = pltriton.load(angles[1], mask=turned, other=0.0)
            self._store(refs, rows, 0, half, first * cos - second * sin)
            self._store(refs, rows, half, half, second * cos + first * sin)
        if rest is not None:
            self._store(refs, rows, 2 * half, refs.qkv.shape[3] - 2 * half, rest)

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

    def _pieces(self, head_dim: int) -> list[tuple[int, int]]:
        """(first, count) of the dims that are turned with partners, of their partners, and of the rest."""
        return [(0, self.half), (self.half, self.half), (2 * self.half, head_dim - 2 * self.half)]

    def _load(self, refs: _Refs, rows: _Rows, kv_head: jax.Array) -> list[jax.Array | None]:
        """All rows, piece by piece: f32[X, count padded to a power of two], zero in the padding; None for no dims."""
        pieces: list[jax.Array | None] = []
        for first, count in self._pieces(refs.qkv.shape[3]):
            if not count:
                pieces.append(None)
                continue
            dims = jnp.arange(power_of_two(count))
            index = refs.qkv.at[rows.token[:, None], kv_head, rows.part[:, None], first + dims[None, :]]
            mask = rows.live[:, None] & (dims < count)[None, :]
            pieces.append(pltriton.load(index, mask=mask, other=0.0).astype(jnp.float32))
        return pieces

    def _normed(self, refs: _Refs, rows: _Rows, pieces: list[jax.Array | None]) -> list[jax.Array | None]:
        """The pieces after the norm of heads, which passes values by."""
        if self.eps is None:
            return pieces
        head_dim, dtype = refs.qkv.shape[3], refs.q.dtype
        square = sum(jnp.sum(piece * piece, axis=1) for piece in pieces if piece is not None)
        factor = lax.rsqrt(square / head_dim + self.eps)[:, None]
        normed: list[jax.Array | None] = []
        for piece, (first, count) in zip(pieces, self._pieces(head_dim), strict=True):
            if piece is None:
                normed.append(None)
                continue
            dims = jnp.arange(piece.shape[1])
            q, k = (
                pltriton.load(ref.at[first + dims], mask=dims < count, other=0.0).astype(jnp.float32) + self.offset
                for ref in (refs.q_norm, refs.k_norm)
            )
            weight = jnp.where((rows.part < self.group)[:, None], q[None, :], k[None, :])
            scaled = (piece * factor * weight).astype(dtype).astype(jnp.float32)
            normed.append(jnp.where((rows.part <= self.group)[:, None], scaled, piece))
        return normed

    def _store(self, refs: _Refs, rows: _Rows, first: int, count: int, x: jax.Array) -> None:
        """Puts some dims of all rows where they belong; x is f32[X, count padded]."""
        dims = jnp.arange(x.shape[1])
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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.write_kv.api`; the arguments are taken as checked."""
    check_addressable(kv_pages)
    tokens, kv_heads, parts, head_dim = qkv.shape
    _, pages, page_size, heads, _ = kv_pages.shape
    per_program = max(1, _ROWS // parts)
    q_norm, k_norm = (jnp.zeros(1, jnp.float32),) * 2 if head_norm is None else (head_norm.q, head_norm.k)
    eps, offset = (None, 0.0) if head_norm is None else (head_norm.eps, head_norm.offset)
    scaled = k_scale is not None or v_scale is not None
    scales = jnp.stack([jnp.asarray(1.0 if s is None else s, jnp.float32).reshape(()) for s in (k_scale, v_scale)])
    pool = kv_pages.reshape(-1, heads, head_dim)
    half = cos.shape[1]
    if not half:  # Pallas takes no empty arrays
        cos = sin = jnp.zeros((1, 1), jnp.float32)
    q, pool = pl.pallas_call(
        _Write(parts - 2, half, per_program, pages * page_size, eps, offset, scaled),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, kv_heads * (parts - 2), head_dim), qkv.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ),
        grid=(pl.cdiv(tokens, per_program), kv_heads),
        input_output_aliases={8: 1},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="write_kv",
    )(qkv, cos, sin, slot_mapping, layer, q_norm, k_norm, scales, pool)
    return q, pool.reshape(kv_pages.shape)
