"""Ragged paged attention for NVIDIA GPUs, in Pallas by way of Triton (sm_80 to sm_100).

Flash attention over pages. A program owns some queries of one row, with all query heads of one KV head: these are the
rows of one product with the keys, so that a key is read once for its whole group. It gathers tiles of keys and values
by their page numbers, from the first that its window reaches to the last that its queries see: work follows the real
lengths, not the shapes.

Rows with one query and rows with more are different problems, one of bandwidth and one of arithmetic: each gets a
launch with tiles of its own, and a decode step only has the first. Where rows are few and contexts may be long, several
programs share the keys of a row ("split-KV") and another launch merges what they found.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.padding import power_of_two
from pallas_kernels.ragged_paged_attention.tiles import Shape, Tiles, decode_tiles, prefill_tiles
from pallas_kernels.stored import check_addressable, widen

_LOWEST = -1e30  # stands for -inf: differences of it stay finite
_LOG2E = 1.4426950408889634  # the kernels work with powers of two

State = tuple[jax.Array, jax.Array, jax.Array]


class _Refs(NamedTuple):
    """The arrays of a launch.

    Attributes:
      q: [T, N, H].
      kv: [L * P * page_size, 2K, H], the pool by slots.
      kv_lens, page_indices, cu_q_lens, num_seqs, layer: as in the operation.
      scales: f32[2], of the scores and of the values.
      sinks: f32[N]; f32[1] where there are none.
    """

    q: Any
    kv: Any
    kv_lens: Any
    page_indices: Any
    cu_q_lens: Any
    num_seqs: Any
    layer: Any
    scales: Any
    sinks: Any


class _Queries(NamedTuple):
    """A program's queries: M (query, head) pairs of one KV head.

    Attributes:
      tokens, heads, positions: i32[M] where they lie in q, and in their sequence.
      live: bool[M]; the others are padding.
    """

    tokens: jax.Array
    heads: jax.Array
    positions: jax.Array
    live: jax.Array


@dataclass(frozen=True)
class _Attention:
    """What is static in a launch, and the parts that its kernels are made of.

    D is the head dim padded to a power of two.

    Attributes:
      shape, tiles: sizes of the call and of its programs.
      compute: dtype of the products.
      pages: P.
      sliding_window, soft_cap, has_sinks: as in the operation.
    """

    shape: Shape
    tiles: Tiles
    compute: Any
    pages: int
    sliding_window: int | None
    soft_cap: float | None
    has_sinks: bool

    def dims(self) -> jax.Array:
        """i32[D]."""
        return jnp.arange(power_of_two(self.shape.head_dim))

    def real(self, dims: jax.Array) -> jax.Array:
        """Which dims are not padding."""
        return dims < self.shape.head_dim

    def mask(self, live: jax.Array) -> jax.Array:
        """bool[X] -> bool[X, D]: the real dims of what is live."""
        width = len(self.dims())
        mask = jnp.broadcast_to(live[:, None], (len(live), width))
        return mask if width == self.shape.head_dim else mask & self.real(self.dims())[None, :]

    def load_queries(self, refs: _Refs, queries: _Queries) -> jax.Array:
        """[M, D] in the dtype of the products; zero where not live."""
        index = refs.q.at[queries.tokens[:, None], queries.heads[:, None], self.dims()[None, :]]
        return pltriton.load(index, mask=self.mask(queries.live), other=0.0).astype(self.compute)

    def store(self, out: Any, queries: _Queries, values: jax.Array) -> None:
        """Writes [M, D] to [T, N, H]."""
        index = out.at[queries.tokens[:, None], queries.heads[:, None], self.dims()[None, :]]
        pltriton.store(index, values.astype(out.dtype), mask=self.mask(queries.live))

    def start(self, refs: _Refs, queries: _Queries) -> State:
        """Sums f32[M, D], and running maximum and weight f32[M], of queries that saw nothing but their sinks."""
        sums, high, weight = _nothing(self)
        if not self.has_sinks:
            return sums, high, weight
        sinks = pltriton.load(refs.sinks.at[queries.heads], mask=queries.live, other=0.0)
        return sums, sinks * _LOG2E, jnp.ones_like(weight)

    def finish(self, refs: _Refs, sums: jax.Array, weight: jax.Array) -> jax.Array:
        """The output f32[M, D]."""
        return sums * (refs.scales[1] / jnp.maximum(weight, 1e-30))[:, None]

    def first_key(self, position: jax.Array) -> jax.Array:
        """The first key that the query at a position sees."""
        if self.sliding_window is None:
            return jnp.int32(0)
        return jnp.maximum(position + 1 - self.sliding_window, 0)

    def attend(
        self,
        refs: _Refs,
        row: jax.Array,
        kv_head: jax.Array,
        queries: _Queries,
        keys: tuple[jax.Array, jax.Array],
        tiles: tuple[jax.Array, jax.Array],
        state: State,
        *,
        all_seen: bool = False,
    ) -> State:
        """Takes more keys into a state.

        Args:
          row, kv_head: i32[].
          keys: i32[] each: the first key that may be read, and the one behind the last.
          tiles: likewise, in tiles.
          all_seen: every query sees every key of these tiles.
        """
        q = self.load_queries(refs, queries)

        def body(tile: jax.Array, state: State) -> State:
            sums, high, weight = state
            key = tile * self.tiles.keys + jnp.arange(self.tiles.keys)
            live = (key >= keys[0]) & (key < keys[1])
            slots = self._slots(refs, row, tile, key, live)
            k = self._load(refs, slots, 2 * kv_head, live, all_seen)
            s = _dot(q, k, trans_b=True) * refs.scales[0]
            if self.soft_cap is not None:
                s = self.soft_cap * jnp.tanh(s / self.soft_cap)
            s = s * _LOG2E
            if not all_seen:
                s = jnp.where(self._sees(queries.positions[:, None], key[None, :]) & live[None, :], s, _LOWEST)
            new_high = jnp.maximum(high, jnp.max(s, axis=1))
            # Before its window begins, a query weighs keys that it does not see; `keep` is 0 at the first that it sees.
            weights = jnp.exp2(s - new_high[:, None])
            keep = jnp.exp2(high - new_high)
            v = self._load(refs, slots, 2 * kv_head + 1, live, all_seen)
            sums = sums * keep[:, None] + _dot(weights.astype(self.compute), v)
            return sums, new_high, weight * keep + jnp.sum(weights, axis=1)

        return lax.fori_loop(*tiles, body, state)

    def _sees(self, query: jax.Array, key: jax.Array) -> jax.Array:
        seen = key <= query
        return seen if self.sliding_window is None else seen & (key > query - self.sliding_window)

    def _slots(self, refs: _Refs, row: jax.Array, tile: jax.Array, key: jax.Array, live: jax.Array) -> jax.Array:
        """i32[C]: where the keys of a tile lie in the pool."""
        page_size, size = self.shape.page_size, self.tiles.keys
        first = refs.layer[0] * self.pages
        if page_size % size == 0:  # one page holds the tile
            page = first + refs.page_indices[row, tile * size // page_size]
            return page * page_size + tile * size % page_size + jnp.arange(size)
        page = first + pltriton.load(refs.page_indices.at[row, key // page_size], mask=live, other=0)
        return page * page_size + key % page_size

    def _load(self, refs: _Refs, slots: jax.Array, head: jax.Array, live: jax.Array, all_live: bool) -> jax.Array:
        """[C, D] in the dtype of the products. Zero where not live: there may be NaN, and 0 * NaN is NaN."""
        index = refs.kv.at[slots[:, None], head, self.dims()[None, :]]
        if all_live and len(self.dims()) == self.shape.head_dim:
            return widen(pltriton.load(index), self.compute)
        mask = self.mask(jnp.full(live.shape, True) if all_live else live)
        return widen(pltriton.load(index, mask=mask, other=jnp.zeros((), refs.kv.dtype)), self.compute)


def _decode_queries(attention: _Attention, refs: _Refs, row: jax.Array, kv_head: jax.Array) -> _Queries:
    """The heads of a row's one query."""
    head = jnp.arange(attention.tiles.rows)
    token = jnp.full_like(head, refs.cu_q_lens[row])
    position = jnp.full_like(head, refs.kv_lens[row] - 1)
    return _Queries(token, kv_head * attention.shape.group + head, position, head < attention.shape.group)


def _decodes(refs: _Refs, row: jax.Array) -> jax.Array:
    """Whether a row has one query."""
    return (row < refs.num_seqs[0]) & (refs.cu_q_lens[row + 1] - refs.cu_q_lens[row] == 1)


def _split_tiles(attention: _Attention, refs: _Refs, row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """i32[] each: the first tile of keys of a decode, the one behind its last, and tiles per split."""
    size = attention.tiles.keys
    first = attention.first_key(refs.kv_lens[row] - 1) // size
    end = pl.cdiv(refs.kv_lens[row], size)
    return first, end, pl.cdiv(end - first, attention.tiles.splits)


def _decode_kernel(*all_refs: Any, attention: _Attention, zero_rest: bool) -> None:
    """Program (KV head, row, split): one query, some of its keys.

    Programs that run at the same time are those of one row: they read neighbouring memory.
    """
    refs, outs = _Refs(*all_refs[: len(_Refs._fields)]), all_refs[len(_Refs._fields) :]
    kv_head, row, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    last_row = attention.shape.rows - 1

    @pl.when(_decodes(refs, jnp.minimum(row, last_row)) & (row <= last_row))
    def _() -> None:
        queries = _decode_queries(attention, refs, row, kv_head)
        first, end, per_split = _split_tiles(attention, refs, row)
        begin = first + split * per_split
        tiles = (begin, jnp.minimum(begin + per_split, end))
        position = refs.kv_lens[row] - 1
        keys = (attention.first_key(position), position + 1)
        whole = attention.tiles.splits == 1
        state = attention.start(refs, queries) if whole else _nothing(attention)
        sums, high, weight = attention.attend(refs, row, kv_head, queries, keys, tiles, state)
        if whole:
            attention.store(outs[0], queries, attention.finish(refs, sums, weight))
            return

        @pl.when(tiles[0] < tiles[1])
        def _() -> None:
            part_sums, part_high, part_weight = outs
            head = jnp.arange(attention.tiles.rows)
            index = (row, kv_head, split, head[:, None], attention.dims()[None, :])
            pltriton.store(part_sums.at[index], sums, mask=attention.mask(queries.live))
            pltriton.store(part_high.at[row, kv_head, split, head], high, mask=queries.live)
            pltriton.store(part_weight.at[row, kv_head, split, head], weight, mask=queries.live)

    if zero_rest:
        _zero_token(attention, refs, outs[0], row, kv_head)


def _nothing(attention: _Attention) -> State:
    """The state of queries that saw no key."""
    rows = attention.tiles.rows
    sums = jnp.zeros((rows, len(attention.dims())), jnp.float32)
    return sums, jnp.full(rows, _LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32)


def _merge_kernel(*all_refs: Any, attention: _Attention, zero_rest: bool) -> None:
    """Program (query head, row): the output of a query from what its splits found, all read at once."""
    refs = _Refs(*all_refs[: len(_Refs._fields)])
    part_sums, part_high, part_weight, out = all_refs[len(_Refs._fields) :]
    head, row = pl.program_id(0), pl.program_id(1)
    group, last_row = attention.shape.group, attention.shape.rows - 1

    @pl.when(_decodes(refs, jnp.minimum(row, last_row)) & (row <= last_row))
    def _() -> None:
        first, end, per_split = _split_tiles(attention, refs, row)
        split = jnp.arange(attention.tiles.splits)
        live = split * per_split < end - first
        index = (row, head // group, split, head % group)
        high = pltriton.load(part_high.at[index], mask=live, other=_LOWEST)
        weight = pltriton.load(part_weight.at[index], mask=live, other=0.0)
        dims = attention.dims()
        at = part_sums.at[row, head // group, split[:, None], head % group, dims[None, :]]
        sums = pltriton.load(at, mask=attention.mask(live), other=0.0)

        top = jnp.max(high)
        sink = refs.sinks[head] * _LOG2E if attention.has_sinks else _LOWEST
        top = jnp.maximum(top, sink)
        share = jnp.exp2(high - top)
        total = jnp.sum(weight * share) + (jnp.exp2(sink - top) if attention.has_sinks else 0.0)
        merged = jnp.sum(sums * share[:, None], axis=0) * (refs.scales[1] / jnp.maximum(total, 1e-30))
        pltriton.store(out.at[refs.cu_q_lens[row], head, dims], merged.astype(out.dtype), mask=attention.real(dims))

    if zero_rest:
        dims = attention.dims()
        nobodys = (row >= refs.cu_q_lens[refs.num_seqs[0]]) & (row < attention.shape.tokens)
        zeros = jnp.zeros(len(dims), out.dtype)
        pltriton.store(out.at[row, head, dims], zeros, mask=attention.real(dims) & nobodys)


def _zero_token(attention: _Attention, refs: _Refs, out: Any, token: jax.Array, kv_head: jax.Array) -> None:
    """Writes zeros for a token that no live row owns."""
    head = jnp.arange(attention.tiles.rows)
    live = (head < attention.shape.group) & (token >= refs.cu_q_lens[refs.num_seqs[0]])
    live &= token < attention.shape.tokens
    tokens = jnp.full_like(head, token)
    rest = _Queries(tokens, kv_head * attention.shape.group + head, tokens, live)
    attention.store(out, rest, jnp.zeros((len(head), len(attention.dims())), jnp.float32))


def _prefill_kernel(*all_refs: Any, attention: _Attention) -> None:
    """Program (tile of queries, KV head), for rows with more than one query, and for the tokens behind all rows.

    Every row begins a new tile. Row s, of those before the tokens of no row, has the tiles from
    `cu_q_lens[s] // queries + s` on: this grows by at least the tiles that it needs, and a program finds its row by
    counting. (Kwon et al.'s vLLM places its tiles so.)
    """
    refs = _Refs(*all_refs[: len(_Refs._fields)])
    out = all_refs[-1]
    tile, kv_head = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1)  # the longest of a row first
    shape, count = attention.shape, refs.num_seqs[0]
    per_tile = attention.tiles.rows // shape.group

    rows = jnp.arange(power_of_two(shape.rows + 1))
    starts = pltriton.load(refs.cu_q_lens.at[rows], mask=rows <= count, other=0)
    begun = (rows <= count) & (starts // per_tile + rows <= tile)
    row = jnp.sum(begun.astype(jnp.int32)) - 1
    start = refs.cu_q_lens[row]
    end = jnp.where(row == count, shape.tokens, refs.cu_q_lens[jnp.minimum(row + 1, shape.rows)])
    offset = (tile - start // per_tile - row) * per_tile

    pair = jnp.arange(attention.tiles.rows)
    token = start + offset + pair // shape.group
    live = (pair < per_tile * shape.group) & (token < end)
    length = refs.kv_lens[jnp.minimum(row, shape.rows - 1)]
    first = length - (end - start) + offset  # position of the tile's first query
    queries = _Queries(token, kv_head * shape.group + pair % shape.group, first + pair // shape.group, live)

    @pl.when((row < count) & (end - start > 1) & (start + offset < end))
    def _() -> None:
        keys = (attention.first_key(first), jnp.minimum(first + per_tile, length))
        size = attention.tiles.keys
        tiles = (keys[0] // size, pl.cdiv(keys[1], size))
        state = attention.start(refs, queries)
        if attention.sliding_window is None:  # most tiles lie before every query: no masks there
            seen = (first + 1) // size
            state = attention.attend(refs, row, kv_head, queries, keys, (tiles[0], seen), state, all_seen=True)
            tiles = (seen, tiles[1])
        sums, _, weight = attention.attend(refs, row, kv_head, queries, keys, tiles, state)
        attention.store(out, queries, attention.finish(refs, sums, weight))

    @pl.when(row == count)
    def _() -> None:
        attention.store(out, queries, jnp.zeros((attention.tiles.rows, len(attention.dims())), jnp.float32))


def _dot(a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    """A product of two tiles, summed in float32; float32 operands are not cut to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return pltriton.dot(a, b, trans_b=trans_b, precision=precision).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("sm_scale", "sliding_window", "soft_cap", "decode_only", "interpret"))
def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    layer: jax.Array,
    sinks: jax.Array | None,
    k_scale: float | jax.Array | None,
    v_scale: float | jax.Array | None,
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    decode_only: bool,
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.ragged_paged_attention.api`; the arguments are taken as checked."""
    check_addressable(kv_pages)
    _, pages, page_size, heads, head_dim = kv_pages.shape
    compute = _compute_dtype(q.dtype, kv_pages.dtype)
    shape = Shape(
        tokens=q.shape[0],
        rows=kv_lens.shape[0],
        kv_heads=heads // 2,
        group=q.shape[1] // (heads // 2),
        head_dim=head_dim,
        pool_dtype=str(kv_pages.dtype),
        compute_bytes=compute.itemsize,
        page_size=page_size,
        max_pages=page_indices.shape[1],
    )
    attention = functools.partial(
        _Attention,
        shape,
        compute=compute,
        pages=pages,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
    )
    scales = [sm_scale * (1.0 if k_scale is None else k_scale), 1.0 if v_scale is None else v_scale]
    refs = _Refs(
        q,
        kv_pages.reshape(-1, heads, head_dim),
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        layer,
        jnp.stack([jnp.asarray(scale, jnp.float32).reshape(()) for scale in scales]),
        jnp.zeros(1, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
    )
    out = _decode(attention(decode_tiles(shape)), refs, zero_rest=decode_only, interpret=interpret)
    if decode_only:
        return out
    return _prefill(attention(prefill_tiles(shape)), refs, out, interpret=interpret)


def _compute_dtype(query: Any, pool: Any) -> jnp.dtype:
    """Of the products: wide enough for queries and pool. Numbers of 8 bits are exact in all 16-bit types."""
    if pool == jnp.uint16:
        pool = jnp.bfloat16
    return jnp.dtype(jnp.promote_types(query, pool) if jnp.dtype(pool).itemsize > 1 else query)


def _decode(attention: _Attention, refs: _Refs, *, zero_rest: bool, interpret: bool) -> jax.Array:
    """[T, N, H]: the rows with one query; with `zero_rest` zero for the tokens of no row, else anything there."""
    shape, tiles = attention.shape, attention.tiles
    rows = max(shape.rows, shape.tokens) if zero_rest else shape.rows
    out = jax.ShapeDtypeStruct(refs.q.shape, refs.q.dtype)
    split = tiles.splits > 1
    if split:
        parts = (shape.rows, shape.kv_heads, tiles.splits, shape.group)
        weights = jax.ShapeDtypeStruct(parts, jnp.float32)
        first = (jax.ShapeDtypeStruct((*parts, shape.head_dim), jnp.float32), weights, weights)
    found = _launch(
        functools.partial(_decode_kernel, attention=attention, zero_rest=zero_rest and not split),
        "attend_decode",
        (shape.kv_heads, shape.rows if split else rows, tiles.splits),
        refs,
        first if split else out,
        tiles,
        interpret,
    )
    if not split:
        return found
    merge = functools.partial(_merge_kernel, attention=attention, zero_rest=zero_rest)
    warps = max(4, tiles.splits * power_of_two(shape.head_dim) // 1024)  # 32 numbers a thread, at most
    one = dataclasses.replace(tiles, num_warps=warps, num_stages=1)
    return _launch(merge, "merge_splits", (shape.kv_heads * shape.group, rows), (*refs, *found), out, one, interpret)


def _prefill(attention: _Attention, refs: _Refs, out: jax.Array, *, interpret: bool) -> jax.Array:
    """[T, N, H]: `out` with the rows of more than one query, and zeros for the tokens of no row, put in."""
    shape, tiles = attention.shape, attention.tiles
    count = shape.tokens // (tiles.rows // shape.group) + shape.rows + 1
    kernel = functools.partial(_prefill_kernel, attention=attention)
    shapes = jax.ShapeDtypeStruct(out.shape, out.dtype)
    return _launch(
        kernel, "attend_prefill", (count, shape.kv_heads), (*refs, out), shapes, tiles, interpret, {len(refs): 0}
    )


def _launch(
    kernel: Any,
    name: str,
    grid: tuple[int, ...],
    arrays: tuple,
    out: Any,
    tiles: Tiles,
    interpret: bool,
    aliases: dict[int, int] | None = None,
) -> Any:
    """One launch of a kernel on whole arrays."""
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=grid,
        input_output_aliases=aliases or {},
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name=name,
    )(*arrays)
