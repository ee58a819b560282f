"""ragged_paged_attention for TPUs v5e, v5p, v6e and v7x, in Pallas (Mosaic).

One program per TensorCore walks over the batch: items of consecutive queries of one row, and for each of them the tiles
of keys that they see. A tile's pages are copied from the pool in HBM into a ring of buffers in VMEM, keys and values of
all heads together, while earlier tiles are worked on; the walk of the copies runs ahead of the walk of the arithmetic,
over the ends of rows too, so short contexts keep the memory as busy as long ones. Two launches share this kernel: rows
with one query, and rows with more, several queries of which go through the matrix unit together. Each writes its
tokens into one zeroed output.

Covered: any number of query heads per KV head, float32 and bfloat16 (as itself or as bits) pools with any number of KV
heads, int8 and float8 pools with 2 or a multiple of 4 KV heads, head_dim up to 128 or a multiple of 128. Where head_dim
is no multiple of 128, XLA keeps a pool in another order of axes by default and would copy it for every call: hold it in
row-major order then (`jax.experimental.layout`), or pad head_dim. Products are of bfloat16 where queries and pool have
no more precision, else of float32. Sums are float32. float16 queries are computed as float32; TPUs have no float16
pages.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
DECODE_BYTES = 2**20  # of one tile of keys and values
DECODE_DEPTH = 4  # tiles in the ring: what hides the latency of HBM
PREFILL_KEYS = 512  # per tile
PREFILL_ROWS = 512  # queries x heads of a group per item, at most
PREFILL_DEPTH = 2
VMEM_BYTES = 64 * 2**20  # what the chip with the least has

_LOWEST = -1e30  # stands for -inf: differences of it stay finite
_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class _Plan:
    """What is static in a launch.

    Attributes:
      several: whether it serves the rows with several queries, or those with one.
      queries: per item.
      keys: per tile.
      depth: tiles in the ring.
      cores: programs, each of which takes every cores-th item.
      kv_heads, group, head_dim: K, G, H.
      page_size: tokens per page.
      max_pages: width of the page table.
      dtype: of the operands of products.
      sliding_window: as in the operation.
      soft_cap: in units of log2.
    """

    several: bool
    queries: int
    keys: int
    depth: int
    cores: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    max_pages: int
    dtype: Any
    sliding_window: int | None
    soft_cap: float | None

    @property
    def rows(self) -> int:
        """Rows of an item's matrix of queries: those of one token are neighbours."""
        return self.queries * self.group

    @property
    def lanes(self) -> int:
        """Numbers of a head that lie side by side in a buffer of keys and values."""
        return min(self.head_dim, LANES)

    @property
    def chunk(self) -> int:
        """Tokens copied at a time."""
        return min(self.page_size, self.keys)


class _Batch(NamedTuple):
    """Scalars of the batch, in SMEM: i32 but for `scales`, f32[2], of scores (to units of log2) and of values."""

    layer: Any
    num_seqs: Any
    cu_q_lens: Any
    kv_lens: Any
    page_indices: Any  # [S * max_pages]
    scales: Any


class _Scratch(NamedTuple):
    """What the kernel keeps in VMEM, and its semaphores; R is `plan.rows`.

    Attributes:
      kv: [depth, H / lanes, keys, 2K, lanes] the ring.
      wide: [H / lanes, keys, 2K, lanes] bfloat16, a tile of a pool of bytes; None for other pools.
      q: [depth, queries, N, H] queries that came with an item's first tile.
      folded: [K, R, H] the item's queries.
      high, total: f32[K, R, LANES] running maximum and sum, the same in all lanes.
      acc: f32[K, R, H] running sum of weighted values.
      out: [2, queries, N, H] on the way to HBM.
      pending: i32[2] tokens of `out` that are on the way, in SMEM.
      kv_sems, q_sems, out_sems: of the copies.
    """

    kv: Any
    wide: Any
    q: Any
    folded: Any
    high: Any
    total: Any
    acc: Any
    out: Any
    pending: Any
    kv_sems: Any
    q_sems: Any
    out_sems: Any


class _Cursor(NamedTuple):
    """A tile of keys: the row, the offset of the item's first query among the row's, and the first key's position."""

    row: jax.Array
    offset: jax.Array
    key: jax.Array


class _Item(NamedTuple):
    """Where an item's queries and keys are.

    Attributes:
      token: of the first query.
      count: of queries.
      position: of the first query.
      start: of the keys that are read, a multiple of the chunk.
      end: one past the last key.
    """

    token: jax.Array
    count: jax.Array
    position: jax.Array
    start: jax.Array
    end: jax.Array


class _Walk(NamedTuple):
    """The order in which a core takes the tiles of the batch."""

    plan: _Plan
    batch: _Batch

    def item(self, row: jax.Array, offset: jax.Array) -> _Item:
        row = jnp.minimum(row, self.batch.kv_lens.shape[0] - 1)
        first, kv_len = self.batch.cu_q_lens[row], self.batch.kv_lens[row]
        q_len = self.batch.cu_q_lens[row + 1] - first
        count = jnp.minimum(q_len - offset, self.plan.queries)
        position = kv_len - q_len + offset
        start = jnp.int32(0)
        if self.plan.sliding_window is not None:
            start = jnp.maximum(position - self.plan.sliding_window + 1, 0) // self.plan.chunk * self.plan.chunk
        return _Item(first + offset, count, position, start, jnp.minimum(kv_len, position + count))

    def first(self) -> _Cursor:
        return self._at(jnp.int32(0), self._first_offset(jnp.int32(0)))

    def next(self, cursor: _Cursor) -> _Cursor:
        key = cursor.key + self.plan.keys
        over = key >= self.item(cursor.row, cursor.offset).end
        step = self.plan.cores * self.plan.queries
        after = self._at(cursor.row, cursor.offset + jnp.where(over, step, 0))
        return after._replace(key=jnp.where(over, after.key, key))

    def live(self, cursor: _Cursor) -> jax.Array:
        return cursor.row < self.batch.num_seqs[0]

    def _first_offset(self, row: jax.Array) -> jax.Array:
        """Where this core begins in a row: cores take turns at the items of a row, and at rows of one item."""
        if self.plan.cores == 1:
            return jnp.int32(0)
        return (row + pl.program_id(0)) % self.plan.cores * self.plan.queries

    def _stops(self, row: jax.Array, offset: jax.Array) -> jax.Array:
        """Whether there is an item here, or nothing but padding."""
        row = jnp.minimum(row, self.batch.kv_lens.shape[0] - 1)
        q_len = self.batch.cu_q_lens[row + 1] - self.batch.cu_q_lens[row]
        mine = q_len > 1 if self.plan.several else q_len == 1
        return mine & (offset < q_len)

    def _at(self, row: jax.Array, offset: jax.Array) -> _Cursor:
        """The first tile of the first item at or after this place."""
        num_seqs = self.batch.num_seqs[0]

        def skip(state):
            row = state[0] + 1
            offset = self._first_offset(row)
            return row, offset, (row >= num_seqs) | self._stops(row, offset)

        state = (row, offset, (row >= num_seqs) | self._stops(row, offset))
        row, offset, _ = lax.while_loop(lambda state: ~state[2], skip, state)
        return _Cursor(row, offset, self.item(row, offset).start)


def _each(count: jax.Array, body) -> None:
    """body(i) for i below count."""
    lax.fori_loop(0, count, lambda i, _: (body(i), 0)[1], 0)


def _pieces(count: jax.Array, limit: int, copy) -> None:
    """copy(offset, size) over `count` <= `limit` tokens, in pieces whose sizes are static powers of two."""
    size = 1 << (limit.bit_length() - 1)
    while size:
        pl.when((count & size) != 0)(functools.partial(copy, count & -2 * size, size))
        size //= 2


class _Copies(NamedTuple):
    """The copies between HBM and VMEM: each function starts one or, with `wait`, waits for it."""

    plan: _Plan
    batch: _Batch
    scratch: _Scratch
    q: Any
    kv_pages: Any
    out: Any

    def fetch(self, cursor: _Cursor, item: _Item, slot: jax.Array, *, wait: bool) -> None:
        """The keys and values of a tile, and the item's queries if it is the first."""
        plan, chunk = self.plan, self.plan.chunk
        count = (jnp.minimum(item.end - cursor.key, plan.keys) + chunk - 1) // chunk

        def copy(i):
            position = cursor.key + i * chunk
            page = self.batch.page_indices[cursor.row * plan.max_pages + position // plan.page_size]
            for group in range(plan.head_dim // plan.lanes):
                self._do(
                    self.kv_pages.at[
                        self.batch.layer[0],
                        page,
                        pl.ds(pl.multiple_of(position % plan.page_size, chunk), chunk),
                        :,
                        pl.ds(group * plan.lanes, plan.lanes),
                    ],
                    self.scratch.kv.at[slot, group, pl.ds(pl.multiple_of(i * chunk, chunk), chunk)],
                    self.scratch.kv_sems.at[slot],
                    wait,
                )

        _each(count, copy)

    def queries(self, item: _Item, slot: jax.Array, *, wait: bool) -> None:
        def copy(offset, size):
            self._do(
                self.q.at[pl.ds(item.token + offset, size)],
                self.scratch.q.at[slot, pl.ds(offset, size)],
                self.scratch.q_sems.at[slot],
                wait,
            )

        _pieces(item.count, self.plan.queries, copy)

    def results(self, token: jax.Array, count: jax.Array, slot: jax.Array, *, wait: bool) -> None:
        def copy(offset, size):
            self._do(
                self.scratch.out.at[slot, pl.ds(offset, size)],
                self.out.at[pl.ds(token + offset, size)],
                self.scratch.out_sems.at[slot],
                wait,
            )

        _pieces(count, self.plan.queries, copy)

    @staticmethod
    def _do(source, target, semaphore, wait: bool) -> None:
        copy = pltpu.make_async_copy(source, target, semaphore)
        copy.wait() if wait else copy.start()


class _Arithmetic(NamedTuple):
    """Flash attention of an item's queries over its tiles."""

    plan: _Plan
    batch: _Batch
    scratch: _Scratch
    sinks: Any  # f32[N, LANES] in units of log2, the same in all lanes; or None

    def begin(self, slot: jax.Array) -> None:
        """Takes up the item whose queries lie in this slot."""
        plan, scratch = self.plan, self.scratch
        shape = (plan.rows, LANES)
        for head in range(plan.kv_heads):
            heads = slice(head * plan.group, (head + 1) * plan.group)
            queries = scratch.q[slot, :, heads, :].astype(jnp.float32)
            scratch.folded[head] = queries.reshape(plan.rows, plan.head_dim).astype(plan.dtype)
            if self.sinks is None:
                scratch.high[head] = jnp.full(shape, _LOWEST)
                scratch.total[head] = jnp.zeros(shape)
            else:
                sinks = jnp.broadcast_to(self.sinks[heads, :][None], (plan.queries, plan.group, LANES))
                scratch.high[head] = sinks.reshape(shape)
                scratch.total[head] = jnp.ones(shape)
            scratch.acc[head] = jnp.zeros((plan.rows, plan.head_dim))

    def end(self, slot: jax.Array) -> None:
        """Puts the item's output into this slot of `out`."""
        plan, scratch = self.plan, self.scratch
        for head in range(plan.kv_heads):
            out = scratch.acc[head] * (self.batch.scales[1] / scratch.total[head][:, :1])
            out = out.reshape(plan.queries, plan.group, plan.head_dim)
            scratch.out[slot, :, head * plan.group : (head + 1) * plan.group, :] = out.astype(scratch.out.dtype)

    def tile(self, cursor: _Cursor, item: _Item, slot: jax.Array) -> None:
        """Adds the tile of keys and values that lies in this slot."""
        plan, scratch = self.plan, self.scratch
        window = plan.sliding_window
        if scratch.wide is not None:
            scratch.wide[...] = scratch.kv[slot].astype(jnp.bfloat16)

        keys = cursor.key + lax.broadcasted_iota(jnp.int32, (plan.keys, 1), 0)
        live = keys < item.end
        # The query of row r stands at item.position + r // G, and r // G >= x just where r >= x * G.
        row = lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
        ahead = lax.broadcasted_iota(jnp.int32, (1, plan.keys), 1) + (cursor.key - item.position)
        seen = row >= ahead * plan.group
        if window is not None:
            live &= keys > item.position - window
            seen &= row < (ahead + window) * plan.group

        for head in range(plan.kv_heads):
            k, v = self._read(head, slot, live)
            s = _dot(scratch.folded[head], k, 1) * self.batch.scales[0]
            if plan.soft_cap is not None:
                s = plan.soft_cap * jnp.tanh(s / plan.soft_cap)
            s = jnp.where(seen, s, _LOWEST)
            old = scratch.high[head]
            high = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
            # Before its window begins, a query weighs keys that it does not see; `keep` is 0 at the first that it sees.
            weights = jnp.exp2(s - high[:, :1])
            keep = jnp.exp2(old - high)
            scratch.high[head] = high
            scratch.total[head] = scratch.total[head] * keep + jnp.sum(weights, axis=1, keepdims=True)
            scratch.acc[head] = scratch.acc[head] * keep[:, :1] + _dot(weights.astype(plan.dtype), v, 0)

    def _read(self, head: int, slot: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One head's keys and values [keys, H] of the tile in this slot; zero values where `live` is false."""
        plan, scratch = self.plan, self.scratch
        keys, values = [], []
        for group in range(plan.head_dim // plan.lanes):
            tile = scratch.kv.at[slot, group] if scratch.wide is None else scratch.wide.at[group]
            if tile.dtype == jnp.float32:
                k, v = tile[:, 2 * head, :], tile[:, 2 * head + 1, :]
                v = jnp.where(live, v, 0)  # 0 * NaN is NaN
            else:
                # A key and its value share 32-bit words, the key in the low half. Bits on top make a float32.
                words = tile.bitcast(jnp.uint32)
                if plan.kv_heads in (1, 2) or plan.kv_heads % 4 == 0:
                    words = words.reshape(plan.keys * plan.kv_heads, plan.lanes)
                    words = words[pl.ds(head, plan.keys, plan.kv_heads), :]
                else:  # several times slower
                    words = words[:, head, :]
                words = jnp.where(live, words, jnp.uint32(0))
                k = pltpu.bitcast(words << 16, jnp.float32)
                v = pltpu.bitcast(words & jnp.uint32(0xFFFF0000), jnp.float32)
            keys.append(k.astype(plan.dtype))
            values.append(v.astype(plan.dtype))
        return jnp.concatenate(keys, axis=1), jnp.concatenate(values, axis=1)


def _dot(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """x [R, C] times y, along `axis` of y; float32 operands are multiplied in full precision."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _kernel(*refs, plan: _Plan, has_sinks: bool, has_wide: bool) -> None:
    refs = list(refs)
    batch = _Batch(*(refs.pop(0) for _ in _Batch._fields))
    q, kv_pages = refs.pop(0), refs.pop(0)
    sinks = refs.pop(0) if has_sinks else None
    del refs[0]  # what `out` holds before: zeros
    out = refs.pop(0)
    if not has_wide:
        refs.insert(1, None)
    scratch = _Scratch(*refs)
    walk = _Walk(plan, batch)
    copies = _Copies(plan, batch, scratch, q, kv_pages, out)
    arithmetic = _Arithmetic(plan, batch, scratch, sinks)

    def fetch(cursor: _Cursor, slot: jax.Array) -> _Cursor:
        """Starts the copies of a tile, if there is one; the next tile."""

        @pl.when(walk.live(cursor))
        def _():
            item = walk.item(cursor.row, cursor.offset)
            copies.fetch(cursor, item, slot, wait=False)
            pl.when(cursor.key == item.start)(lambda: copies.queries(item, slot, wait=False))

        return walk.next(cursor)

    def step(state):
        """Works on tile number `number`, of item number `items`."""
        number, items, cursor, ahead = state
        ahead = fetch(ahead, (number + plan.depth - 1) % plan.depth)
        slot, out_slot = number % plan.depth, items % 2
        item = walk.item(cursor.row, cursor.offset)

        @pl.when(cursor.key == item.start)
        def _():
            copies.queries(item, slot, wait=True)
            arithmetic.begin(slot)

        copies.fetch(cursor, item, slot, wait=True)
        arithmetic.tile(cursor, item, slot)
        last = cursor.key + plan.keys >= item.end

        @pl.when(last)
        def _():
            copies.results(jnp.int32(0), scratch.pending[out_slot], out_slot, wait=True)
            arithmetic.end(out_slot)
            scratch.pending[out_slot] = item.count
            copies.results(item.token, item.count, out_slot, wait=False)

        return number + 1, items + last.astype(jnp.int32), walk.next(cursor), ahead

    scratch.pending[0] = scratch.pending[1] = jnp.int32(0)
    cursor = ahead = walk.first()
    for slot in range(plan.depth - 1):
        ahead = fetch(ahead, jnp.int32(slot))
    lax.while_loop(lambda state: walk.live(state[2]), step, (jnp.int32(0), jnp.int32(0), cursor, ahead))
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
    batch = _Batch(layer, num_seqs, cu_q_lens, kv_lens, page_indices.reshape(-1), scales)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None] * _LOG2E, (len(sinks), LANES))
    out = jnp.zeros_like(q)
    for several in (False,) if decode_only else (False, True):
        plan = _make_plan(q, kv_pages, page_indices.shape[1], several, _cores(interpret), sliding_window, soft_cap)
        out = _launch(plan, batch, q, kv_pages, sinks, out, interpret)
    return out.astype(dtype)


def _launch(
    plan: _Plan,
    batch: _Batch,
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
        pltpu.VMEM((plan.depth, plan.queries, heads, plan.head_dim), q.dtype),
        pltpu.VMEM((*rows, plan.head_dim), plan.dtype),
        pltpu.VMEM((*rows, LANES), jnp.float32),
        pltpu.VMEM((*rows, LANES), jnp.float32),
        pltpu.VMEM((*rows, plan.head_dim), jnp.float32),
        pltpu.VMEM((2, plan.queries, heads, plan.head_dim), q.dtype),
        pltpu.SMEM((2,), jnp.int32),
        pltpu.SemaphoreType.DMA((plan.depth,)),
        pltpu.SemaphoreType.DMA((plan.depth,)),
        pltpu.SemaphoreType.DMA((2,)),
    ]
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    inputs = [q, kv_pages, *([] if sinks is None else [sinks]), out]
    in_specs = [in_hbm, in_hbm, *([] if sinks is None else [pl.BlockSpec(memory_space=pltpu.VMEM)]), in_hbm]
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
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_BYTES),
        name=f"ragged_paged_attention_{'prefill' if plan.several else 'decode'}",
        interpret=interpret,
    )(*batch, *inputs)


def _make_plan(
    q: jax.Array,
    kv_pages: jax.Array,
    max_pages: int,
    several: bool,
    cores: int,
    sliding_window: int | None,
    soft_cap: float | None,
) -> _Plan:
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = kv_pages.shape[2], kv_pages.shape[3] // 2
    group = heads // kv_heads
    if several:
        queries = min(_power_of_two(PREFILL_ROWS // group), _power_of_two(tokens))
        keys, depth = PREFILL_KEYS, PREFILL_DEPTH
    else:
        queries, depth = 1, DECODE_DEPTH
        keys = _power_of_two(DECODE_BYTES // (2 * kv_heads * head_dim * kv_pages.dtype.itemsize))
    narrow = q.dtype == jnp.bfloat16 and kv_pages.dtype != jnp.float32
    return _Plan(
        several=several,
        queries=queries,
        keys=max(LANES, min(keys, PREFILL_KEYS)),
        depth=depth,
        cores=cores,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        max_pages=max_pages,
        dtype=jnp.bfloat16 if narrow else jnp.float32,
        sliding_window=sliding_window,
        soft_cap=None if soft_cap is None else soft_cap * _LOG2E,
    )


def _power_of_two(size: int) -> int:
    """The greatest power of two that is not above size, and 1 at least."""
    return 1 << max(size.bit_length() - 1, 0)


def _cores(interpret: Any) -> int:
    """TensorCores that share a device's memory: two on v5p."""
    if interpret:
        return getattr(interpret, "num_cores_or_threads", 1)
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return getattr(device, "num_cores", None) or 1


def check_covered(kv_pages: jax.Array) -> None:
    """Raises NotImplementedError for a pool that these kernels do not take."""
    kv_heads, head_dim = kv_pages.shape[3] // 2, kv_pages.shape[4]
    if kv_pages.dtype == jnp.float16:
        raise NotImplementedError("tpu: there are no float16 kv_pages on TPUs, use bfloat16 or float32")
    if head_dim > LANES and head_dim % LANES:
        raise NotImplementedError(f"tpu: head_dim must be at most {LANES} or a multiple of it, got {head_dim}")
    if kv_pages.dtype.itemsize == 1 and kv_heads != 2 and kv_heads % 4:
        raise NotImplementedError(
            f"tpu: {kv_pages.dtype} kv_pages must have 2 or a multiple of 4 KV heads, got {kv_heads}"
        )
