"""ragged_paged_attention for TPUs v5e, v5p, v6e and v7x, in Pallas (Mosaic).

One program per TensorCore walks over the batch: items of consecutive queries of one row, and for each of them the tiles
of keys that they see. A tile's pages are copied from the pool in HBM into a ring of buffers in VMEM, keys and values of
all heads together, while earlier tiles are worked on. The page table stays in HBM as well: a tile's page numbers are
copied to SMEM some tiles before they are needed. The walk runs ahead of the arithmetic, over the ends of rows too, so
short contexts keep the memory as busy as long ones; what it finds is kept in SMEM until the arithmetic is there. Two
launches share this kernel: rows with one query, and rows with more, several queries of which go through the matrix unit
together. Each writes its tokens into one zeroed output.

Covered: any numbers of heads, any head_dim, page tables of any size, every pool but float16, which TPUs do not have.
Where 2K is neither 2 (float32, bfloat16), 4 nor a multiple of 8, or head_dim no multiple of 128, XLA keeps a pool
in another order of axes by default and would copy it for every call: hold it in row-major order then
(`jax.experimental.layout`). bfloat16 and 8-bit pools are slower with a number of KV heads that is neither 1, 2 nor a
multiple of 4, and with a head_dim above 128 that is no multiple of it. Products are of bfloat16 where neither queries
nor pool have more precision, else of float32; sums are float32. float16 queries are computed as float32. Lengths and
page numbers are not checked.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuning
from pallas_kernels.ragged_paged_attention.tpu_walk import LANES, LEAD, Batch, Plan, Tile, Walk

# What decides the speed where `tuned/` has no entry: from the schedules that Mosaic makes for these chips, not from
# the chips themselves.
DECODE_BYTES, DECODE_DEPTH = 2**20, 4  # of a tile of keys and values; tiles in the ring, to hide the latency of HBM
PREFILL_BYTES, PREFILL_DEPTH = 2**21, 2
PREFILL_ROWS = 512  # queries x heads of a group per item, at most
STATE_BYTES = 2**23  # of an item's float32 maxima, sums and weighted values, at most
MAX_KEYS = 512  # per tile
UNROLL = 16  # copies that are started without a jump between them
VMEM_BYTES = 48 * 2**20  # of the 64 MiB that the chip with the least has

_LOWEST = -1e30  # stands for -inf: differences of it stay finite
_LOG2E = 1.4426950408889634


class _Scratch(NamedTuple):
    """What the kernel keeps in VMEM, and its semaphores; R is `plan.rows`.

    Attributes:
      kv: [depth, H / lanes, keys, 2K, lanes] the ring.
      wide: [H / lanes, keys, 2K, lanes] bfloat16, a tile of a pool of bytes; None for other pools.
      apart: [2, K, keys, H] keys and values of a tile, head by head; None where they are used as they are taken apart.
      q: [depth, queries, N, H] queries that came with an item's first tile.
      folded: [K, R, H] the item's queries.
      high, total: f32[K, R, LANES] running maximum and sum, the same in all lanes.
      acc: f32[K, R, H] running sum of weighted values.
      out: [2, queries, N, H] on the way to HBM.
      pending: i32[2] tokens of `out` that are on the way, in SMEM.
      tiles: i32[known * fields of a Tile] the tiles from the one that is worked on, in SMEM.
      windows: i32[LEAD, window] page numbers of the tiles whose pages are copied next, in SMEM.
      kv_sems, q_sems, out_sems, window_sems: of the copies.
    """

    kv: Any
    wide: Any
    apart: Any
    q: Any
    folded: Any
    high: Any
    total: Any
    acc: Any
    out: Any
    pending: Any
    tiles: Any
    windows: Any
    kv_sems: Any
    q_sems: Any
    out_sems: Any
    window_sems: Any


def _each(count: Any, body) -> None:
    """body(i) for i below count."""
    lax.fori_loop(0, count, lambda i, _: (body(i), 0)[1], 0)


def _pieces(count: jax.Array, limit: int, copy) -> None:
    """copy(offset, size) over `count` <= `limit` tokens, in pieces whose sizes are static powers of two."""
    size = 1 << (limit.bit_length() - 1)
    while size:
        pl.when((count & size) != 0)(functools.partial(copy, count & -2 * size, size))
        size //= 2


class _Copies(NamedTuple):
    """The copies between HBM and VMEM or SMEM: each function starts one or, with `wait`, waits for it."""

    plan: Plan
    batch: Batch
    scratch: _Scratch
    page_indices: Any  # i32[S * max_pages, padded to the end of any window]
    q: Any
    kv_pages: Any
    out: Any

    def window(self, tile: Tile, slot: jax.Array, *, wait: bool) -> None:
        """The page numbers of a tile, and some before and behind them."""
        first = pl.multiple_of(self._first_page(tile) & -LANES, LANES)
        source = self.page_indices.at[pl.ds(first, self.plan.window)]
        self._do(source, self.scratch.windows.at[slot], self.scratch.window_sems.at[slot], wait)

    def tile(self, tile: Tile, slot: jax.Array, window: Any = None, *, wait: bool) -> None:
        """The keys and values of a tile; to start, its page numbers lie in this slot of `windows`."""
        plan, chunk, chunks = self.plan, self.plan.chunk, self.plan.chunks
        count = jnp.minimum((tile.end - tile.key + chunk - 1) // chunk, chunks)
        first = self._first_page(tile) & (LANES - 1)
        # Where a tile has several chunks, they are whole pages; else it may begin within one.
        place = 0 if chunks > 1 else pl.multiple_of(tile.key % plan.page_size, chunk)

        def copy(i):
            page = 0 if wait else self.scratch.windows[window, first + i]
            for group in range(plan.head_dim // plan.lanes):
                lanes = pl.ds(group * plan.lanes, plan.lanes)
                source = self.kv_pages.at[self.batch.layer[0], page, pl.ds(place, chunk), :, lanes]
                target = self.scratch.kv.at[slot, group, pl.ds(pl.multiple_of(i * chunk, chunk), chunk)]
                self._do(source, target, self.scratch.kv_sems.at[slot], wait)

        @pl.when(count == chunks)
        def _():
            if wait:
                whole = self.scratch.kv.at[slot]
                self._do(whole, whole, self.scratch.kv_sems.at[slot], wait)
            else:
                lax.fori_loop(0, chunks, lambda i, _: (copy(i), 0)[1], 0, unroll=min(chunks, plan.unroll))

        pl.when(count < chunks)(lambda: _each(count, copy))

    def _first_page(self, tile: Tile) -> jax.Array:
        """Where the number of a tile's first page is in the page table."""
        return tile.row * self.plan.max_pages + tile.key // self.plan.page_size

    def queries(self, tile: Tile, slot: jax.Array, *, wait: bool) -> None:
        """The queries of a tile's item."""

        def copy(offset, size):
            source = self.q.at[pl.ds(tile.token + offset, size)]
            target = self.scratch.q.at[slot, pl.ds(offset, size)]
            self._do(source, target, self.scratch.q_sems.at[slot], wait)

        _pieces(self.count(tile), self.plan.queries, copy)

    def results(self, token: jax.Array, count: jax.Array, slot: jax.Array, *, wait: bool) -> None:
        """The output of `count` tokens from this one on."""

        def copy(offset, size):
            source = self.scratch.out.at[slot, pl.ds(offset, size)]
            target = self.out.at[pl.ds(token + offset, size)]
            self._do(source, target, self.scratch.out_sems.at[slot], wait)

        _pieces(count, self.plan.queries, copy)

    def count(self, tile: Tile) -> jax.Array:
        """Queries of a tile's item."""
        return jnp.minimum(tile.q_len - tile.offset, self.plan.queries)

    @staticmethod
    def _do(source, target, semaphore, wait: bool) -> None:
        copy = pltpu.make_async_copy(source, target, semaphore)
        copy.wait() if wait else copy.start()


class _Arithmetic(NamedTuple):
    """Flash attention of an item's queries over its tiles."""

    plan: Plan
    batch: Batch
    scratch: _Scratch
    sinks: Any  # f32[N, LANES] in units of log2, the same in all lanes; or None

    def begin(self, slot: jax.Array) -> None:
        """Takes up the item whose queries lie in this slot. The rows that pad its matrices hold anything."""
        plan, scratch = self.plan, self.scratch
        rows = plan.queries * plan.group
        scratch.acc[...] = jnp.zeros(scratch.acc.shape, jnp.float32)
        scratch.high[...] = jnp.full(scratch.high.shape, _LOWEST)
        scratch.total[...] = jnp.full(scratch.total.shape, 0.0 if self.sinks is None else 1.0)
        for head in range(plan.kv_heads):
            heads = slice(head * plan.group, (head + 1) * plan.group)
            queries = scratch.q[slot, :, heads, :].astype(jnp.float32) * self.batch.scales[0]
            scratch.folded[head, :rows, :] = queries.reshape(rows, plan.head_dim).astype(plan.dtype)
            if self.sinks is not None:
                sinks = jnp.broadcast_to(self.sinks[heads, :][None], (plan.queries, plan.group, LANES))
                scratch.high[head, :rows, :] = sinks.reshape(rows, LANES)

    def end(self, slot: jax.Array) -> None:
        """Puts the item's output into this slot of `out`."""
        plan, scratch = self.plan, self.scratch
        rows = plan.queries * plan.group
        for head in range(plan.kv_heads):
            out = scratch.acc[head, :rows, :] * (self.batch.scales[1] / scratch.total[head, :rows, :1])
            out = out.reshape(plan.queries, plan.group, plan.head_dim)
            scratch.out[slot, :, head * plan.group : (head + 1) * plan.group, :] = out.astype(scratch.out.dtype)

    def tile(self, tile: Tile, slot: jax.Array) -> None:
        """Adds the tile of keys and values that lies in this slot."""
        plan, scratch = self.plan, self.scratch
        self._blank(tile, slot)
        if scratch.wide is not None:
            scratch.wide[...] = scratch.kv[slot].astype(jnp.bfloat16)
        seen = self._seen(tile)
        if not plan.several:
            for first in range(0, plan.kv_heads, plan.heads):
                self._add(first, [self._read(first + i, slot) for i in range(plan.heads)], seen)
            return
        for head in range(plan.kv_heads):
            scratch.apart[0, head], scratch.apart[1, head] = self._read(head, slot)
        _each(plan.kv_heads, lambda head: self._add(head, [(scratch.apart[0, head], scratch.apart[1, head])], seen))

    def _blank(self, tile: Tile, slot: jax.Array) -> None:
        """Puts zeros where the tile has no keys and values: there may be NaN, and 0 * NaN is NaN."""
        kv, keys = self.scratch.kv, self.plan.keys
        size = min(32, keys)

        def put(at):
            kv[slot, :, at] = jnp.zeros((kv.shape[1], at.size, *kv.shape[3:]), kv.dtype)

        @pl.when(tile.end - tile.key < keys)
        def _():
            count = tile.end - tile.key
            blocks = (count + size - 1) // size
            lax.fori_loop(count, blocks * size, lambda i, _: (put(pl.ds(i, 1)), 0)[1], 0)
            lax.fori_loop(blocks, keys // size, lambda i, _: (put(pl.ds(i * size, size)), 0)[1], 0)

    def _seen(self, tile: Tile) -> jax.Array:
        """bool[R or 1, keys]: whether the query sees the key."""
        plan = self.plan
        # The query of row r stands at position + r // G, and r // G >= x just where r >= x * G.
        row = lax.broadcasted_iota(jnp.int32, (plan.rows if plan.several else 1, 1), 0)
        ahead = lax.broadcasted_iota(jnp.int32, (1, plan.keys), 1) + (tile.key - tile.position)
        seen = row >= ahead * plan.group
        if plan.sliding_window is not None:
            seen &= row < (ahead + plan.sliding_window) * plan.group
        return seen

    def _add(self, first: Any, kv: list[tuple[jax.Array, jax.Array]], seen: jax.Array) -> None:
        """Adds the keys and values [keys, H] of some KV heads from `first` on."""
        plan, scratch = self.plan, self.scratch
        heads = pl.ds(first, len(kv))
        s = jnp.stack([_dot(scratch.folded[first + i], k, 1) for i, (k, _) in enumerate(kv)])
        if plan.soft_cap is not None:
            s = plan.soft_cap * jnp.tanh(s / plan.soft_cap)
        s = jnp.where(seen[None], s, _LOWEST)
        old = scratch.high[heads]
        high = jnp.maximum(old, jnp.max(s, axis=2, keepdims=True))
        # Before its window begins, a query weighs keys that it does not see; `keep` is 0 at the first that it sees.
        weights = jnp.exp2(s - _widen(high, plan.keys))
        keep = jnp.exp2(old - high)
        scratch.high[heads] = high
        scratch.total[heads] = scratch.total[heads] * keep + jnp.sum(weights, axis=2, keepdims=True)
        weights = weights.astype(plan.dtype)
        values = jnp.stack([_dot(weights[i], v, 0) for i, (_, v) in enumerate(kv)])
        scratch.acc[heads] = scratch.acc[heads] * _widen(keep, plan.head_dim) + values

    def _read(self, head: int, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One head's keys and values [keys, H] of the tile in this slot."""
        plan, scratch = self.plan, self.scratch
        keys, values = [], []
        for group in range(plan.head_dim // plan.lanes):
            ref = scratch.kv.at[slot, group] if scratch.wide is None else scratch.wide.at[group]
            if ref.dtype == jnp.float32:
                k, v = ref[:, 2 * head, :], ref[:, 2 * head + 1, :]
            else:
                # A key and its value share 32-bit words, the key in the low half. Bits on top make a float32.
                words = ref.bitcast(jnp.uint32)
                if plan.strided:
                    words = words.reshape(plan.keys * plan.kv_heads, plan.lanes)
                    words = words[pl.ds(head, plan.keys, plan.kv_heads), :]
                else:  # several times slower
                    words = words[:, head, :]
                k = pltpu.bitcast(words << 16, jnp.float32)
                v = pltpu.bitcast(words & jnp.uint32(0xFFFF0000), jnp.float32)
            keys.append(k.astype(plan.dtype))
            values.append(v.astype(plan.dtype))
        return jnp.concatenate(keys, axis=1), jnp.concatenate(values, axis=1)


def _widen(x: jax.Array, width: int) -> jax.Array:
    """x [.., LANES], the same in all lanes, as [.., width]: moves nothing between lanes."""
    return x[..., :width] if width <= LANES else jnp.concatenate([x] * -(-width // LANES), axis=-1)[..., :width]


def _dot(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """x [R, C] times y, along `axis` of y; float32 operands are multiplied in full precision."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _kernel(*refs, plan: Plan, has_sinks: bool, has_wide: bool) -> None:
    refs = list(refs)
    batch = Batch(*(refs.pop(0) for _ in Batch._fields))
    page_indices, q, kv_pages = refs.pop(0), refs.pop(0), refs.pop(0)
    sinks = refs.pop(0) if has_sinks else None
    del refs[0]  # what `out` holds before: zeros
    out = refs.pop(0)
    if not has_wide:
        refs.insert(1, None)
    if not plan.several:
        refs.insert(2, None)
    scratch = _Scratch(*refs)
    walk = Walk(plan, batch)
    copies = _Copies(plan, batch, scratch, page_indices, q, kv_pages, out)
    arithmetic = _Arithmetic(plan, batch, scratch, sinks)

    def place(number: Any, field: int) -> Any:
        return (number & (plan.known - 1)) * len(Tile._fields) + field

    def known(number: Any) -> Tile:
        return Tile(*(scratch.tiles[place(number, field)] for field in range(len(Tile._fields))))

    def live(number: Any) -> jax.Array:
        return walk.live(scratch.tiles[place(number, Tile._fields.index("row"))])

    def announce(number: Any, tile: Tile) -> Tile:
        """Keeps a tile and starts the copy of its page numbers, if there is such a tile; the next one."""
        for field, value in enumerate(tile):
            scratch.tiles[place(number, field)] = value
        pl.when(walk.live(tile.row))(lambda: copies.window(tile, number % LEAD, wait=False))
        return walk.next(tile)

    def fetch(number: Any, far: Tile) -> Tile:
        """Starts the copies of a tile, if there is one, and announces the one LEAD further, which is `far`."""

        @pl.when(live(number))
        def _():
            tile = known(number)
            copies.window(tile, number % LEAD, wait=True)
            copies.tile(tile, number % plan.depth, number % LEAD, wait=False)
            pl.when(tile.key == tile.start)(lambda: copies.queries(tile, number % plan.depth, wait=False))

        return announce(number + LEAD, far)

    def step(state):
        """Works on tile number `number`, of item number `items`; the first of a state is whether there is one."""
        _, number, items, far = state
        far = fetch(number + plan.depth - 1, far)
        slot, out_slot = number % plan.depth, items % 2
        tile = known(number)

        @pl.when(tile.key == tile.start)
        def _():
            copies.queries(tile, slot, wait=True)
            arithmetic.begin(slot)

        copies.tile(tile, slot, wait=True)
        arithmetic.tile(tile, slot)
        last = tile.key + plan.keys >= tile.end

        @pl.when(last)
        def _():
            copies.results(jnp.int32(0), scratch.pending[out_slot], out_slot, wait=True)
            arithmetic.end(out_slot)
            scratch.pending[out_slot] = copies.count(tile)
            copies.results(tile.token, copies.count(tile), out_slot, wait=False)

        return live(number + 1), number + 1, items + last.astype(jnp.int32), far

    scratch.pending[0] = scratch.pending[1] = jnp.int32(0)
    far = lax.fori_loop(0, LEAD, announce, walk.first())
    far = lax.fori_loop(0, plan.depth - 1, fetch, far)
    lax.while_loop(lambda state: state[0], step, (live(0), jnp.int32(0), jnp.int32(0), far))
    for slot in range(2):
        copies.results(jnp.int32(0), scratch.pending[slot], jnp.int32(slot), wait=True)


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
    interpret: Any,
) -> jax.Array:
    """See `pallas_kernels.ragged_paged_attention.api`; the arguments are taken as checked.

    `interpret` may also be `pltpu.InterpretParams`, which knows float32 pools only.
    """
    check_covered(kv_pages)
    dtype = q.dtype
    if dtype == jnp.float16:
        q = q.astype(jnp.float32)
    scales = jnp.stack(
        [
            jnp.float32(sm_scale * _LOG2E) * (1 if k_scale is None else k_scale),
            jnp.float32(1) * (1 if v_scale is None else v_scale),
        ]
    )
    batch = Batch(layer, num_seqs, cu_q_lens, kv_lens, scales)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None] * _LOG2E, (len(sinks), LANES))
    out = jnp.zeros_like(q)
    for several in (False,) if decode_only else (False, True):
        plan = _make_plan(q, kv_pages, page_indices.shape[1], several, interpret, sliding_window, soft_cap)
        out = _launch(plan, batch, page_indices, q, kv_pages, sinks, out, interpret)
    return out.astype(dtype)


def _launch(
    plan: Plan,
    batch: Batch,
    page_indices: jax.Array,
    q: jax.Array,
    kv_pages: jax.Array,
    sinks: jax.Array | None,
    out: jax.Array,
    interpret: Any,
) -> jax.Array:
    """`out` [T, N, H] with the output of the rows that the plan serves put in."""
    heads = q.shape[1]
    groups = plan.head_dim // plan.lanes
    wide = kv_pages.dtype.itemsize == 1
    tile = (groups, plan.keys, 2 * plan.kv_heads, plan.lanes)
    rows = (plan.kv_heads, plan.rows)
    scratch = [
        pltpu.VMEM((plan.depth, *tile), kv_pages.dtype),
        *([pltpu.VMEM(tile, jnp.bfloat16)] if wide else []),
        *([pltpu.VMEM((2, plan.kv_heads, plan.keys, plan.head_dim), plan.dtype)] if plan.several else []),
        pltpu.VMEM((plan.depth, plan.queries, heads, plan.head_dim), q.dtype),
        pltpu.VMEM((*rows, plan.head_dim), plan.dtype),
        pltpu.VMEM((*rows, LANES), jnp.float32),
        pltpu.VMEM((*rows, LANES), jnp.float32),
        pltpu.VMEM((*rows, plan.head_dim), jnp.float32),
        pltpu.VMEM((2, plan.queries, heads, plan.head_dim), q.dtype),
        pltpu.SMEM((2,), jnp.int32),
        pltpu.SMEM((plan.known * len(Tile._fields),), jnp.int32),
        pltpu.SMEM((LEAD, plan.window), jnp.int32),
        pltpu.SemaphoreType.DMA((plan.depth,)),
        pltpu.SemaphoreType.DMA((plan.depth,)),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((LEAD,)),
    ]
    table = page_indices.reshape(-1)
    table = jnp.pad(table, (0, -table.size % LANES + plan.window - LANES))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    inputs = [table, q, kv_pages, *([] if sinks is None else [sinks]), out]
    in_specs = [in_hbm, in_hbm, in_hbm, *([] if sinks is None else [pl.BlockSpec(memory_space=pltpu.VMEM)]), in_hbm]
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan, has_sinks=sinks is not None, has_wide=wide),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(batch),
            grid=(plan.cores,),
            in_specs=in_specs,
            out_specs=in_hbm,
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={len(batch) + len(inputs) - 1: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True
        ),
        name=f"ragged_paged_attention_{'prefill' if plan.several else 'decode'}",
        interpret=interpret,
    )(*batch, *inputs)


def _make_plan(
    q: jax.Array,
    kv_pages: jax.Array,
    max_pages: int,
    several: bool,
    interpret: Any,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Plan:
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = kv_pages.shape[2], kv_pages.shape[3] // 2
    group = heads // kv_heads
    tile_bytes, depth, queries = DECODE_BYTES, DECODE_DEPTH, 1
    if several:
        tile_bytes, depth = PREFILL_BYTES, PREFILL_DEPTH
        state = STATE_BYTES // (heads * (head_dim + 2 * LANES) * 4)
        queries = _floor_power_of_two(min(PREFILL_ROWS // group, state, tokens))
    keys = _floor_power_of_two(tile_bytes // (2 * kv_heads * head_dim * kv_pages.dtype.itemsize))
    key = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "pool_dtype": str(kv_pages.dtype)}
    key |= {"page_size": page_size, "tokens": tokens}
    rule = {"queries": queries, "keys": max(LANES, min(keys, MAX_KEYS)), "depth": depth}
    tiles = tuning.lookup("ragged_paged_attention", "tpu_prefill" if several else "tpu_decode", key, rule)
    narrow = q.dtype == jnp.bfloat16 and kv_pages.dtype != jnp.float32
    return Plan(
        several=several,
        queries=tiles["queries"],
        keys=tiles["keys"],
        depth=tiles["depth"],
        unroll=1 if interpret else UNROLL,
        cores=_cores(interpret),
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        max_pages=max_pages,
        dtype=jnp.bfloat16 if narrow else jnp.float32,
        sliding_window=sliding_window,
        soft_cap=None if soft_cap is None else soft_cap * _LOG2E,
    )


def _floor_power_of_two(size: int) -> int:
    """The greatest power of two that is not above size, and 1 at least."""
    return 1 << max(size.bit_length() - 1, 0)


def _cores(interpret: Any) -> int:
    """TensorCores that share a device's memory: two on v5p."""
    if interpret:
        return getattr(interpret, "num_cores_or_threads", 1)
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return getattr(device, "num_cores", None) or 1


def check_covered(kv_pages: jax.Array) -> None:
    """Raises NotImplementedError for what these kernels do not take."""
    if kv_pages.dtype == jnp.float16:
        raise NotImplementedError("tpu: there are no float16 kv_pages on TPUs, use bfloat16 or float32")
