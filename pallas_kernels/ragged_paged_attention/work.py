"""What the xla implementation has to do for a batch: which tiles of keys, for which queries.

All of it follows from the step's metadata alone, so it is the same for every layer of a model and XLA computes it once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class DecodeWork(NamedTuple):
    """A flat list of (row, tile of keys) for the rows with one query.

    The rows are numbered by the order in which they have work: w consecutive items touch at most w consecutive numbers.

    Attributes:
      rows: i32[S] number -> row.
      ordinals: i32[S] row -> number.
      starts: i32[S] number -> first key position that is read, a multiple of the chunk size.
      ends: i32[S] number -> one past the row's last item; beyond the last row with work it stays at the total.
    """

    rows: jax.Array
    ordinals: jax.Array
    starts: jax.Array
    ends: jax.Array

    @property
    def total(self) -> jax.Array:
        """i32[] the number of items."""
        return self.ends[-1]

    def tiles(self, items: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
        """The row's number and the first key's position of each item i32[w]; any numbers for items past the total."""
        number = find(self.ends, items)
        before = jnp.where(number > 0, self.ends[number - 1], 0)
        return number, self.starts[number] + (items - before) * tile


class PrefillWork(NamedTuple):
    """A flat list of (row, tile of queries) for the rows with more than one query.

    Attributes:
      ends: i32[S] row -> one past the row's last item.
    """

    ends: jax.Array

    @property
    def total(self) -> jax.Array:
        """i32[] the number of items."""
        return self.ends[-1]

    def tile(self, item: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
        """The row of an item i32[], and the offset of the item's first query among the row's."""
        row = find(self.ends, item)
        return row, (item - jnp.where(row > 0, self.ends[row - 1], 0)) * tile


class SharedWork(NamedTuple):
    """Tiles of keys that many rows with one query have in common: they lie in the same pages.

    Attributes:
      leaders: i32[S] row -> the first row whose keys begin in the same pages; the row itself if there is none.
      lens: i32[S] row -> how many of its first keys are in the list; 0 for rows that share too little, or with too few.
      ends: i32[S] leader -> one past its group's last item.
    """

    leaders: jax.Array
    lens: jax.Array
    ends: jax.Array

    @property
    def total(self) -> jax.Array:
        """i32[] the number of items."""
        return self.ends[-1]

    def tile(self, item: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
        """The leader of an item's group i32[], and the position of the item's first key."""
        leader = find(self.ends, item)
        return leader, (item - jnp.where(leader > 0, self.ends[leader - 1], 0)) * tile


def query_lens(cu_q_lens: jax.Array, num_seqs: jax.Array) -> jax.Array:
    """i32[S] queries per row; zero for padding rows."""
    lens = cu_q_lens[1:] - cu_q_lens[:-1]
    return jnp.where(jnp.arange(lens.shape[0]) < num_seqs[0], lens, 0)


def find(ends: jax.Array, items: jax.Array) -> jax.Array:
    """The entry of `ends` (cumulative counts) that owns each item; the last entry if none does."""
    owner = jnp.searchsorted(ends, items, side="right", method="compare_all").astype(jnp.int32)
    return jnp.minimum(owner, ends.shape[0] - 1)


def decode_work(
    q_lens: jax.Array, kv_lens: jax.Array, shared: jax.Array, *, tile: int, chunk: int, sliding_window: int | None
) -> DecodeWork:
    """The work list of the rows with one query.

    Args:
      q_lens, kv_lens: i32[S].
      shared: i32[S] keys at the beginning of each row that are not in the list, fewer than it has; a multiple of chunk.
      tile: keys per item.
      chunk: every tile starts at a multiple of it.
      sliding_window: keys seen by a query; the tiles before them are not in the list.
    """
    active = (q_lens == 1) & (kv_lens > 0)
    counts = jnp.cumsum(active, dtype=jnp.int32)
    rows = find(counts, jnp.arange(counts.shape[0]))
    lens = kv_lens[rows]
    starts = jnp.maximum(first_key(lens - 1, chunk, sliding_window), shared[rows])
    tiles = jnp.where(jnp.arange(rows.shape[0]) < counts[-1], ceil_div(lens - starts, tile), 0)
    return DecodeWork(rows, jnp.maximum(counts - 1, 0), starts, jnp.cumsum(tiles, dtype=jnp.int32))


def prefill_work(q_lens: jax.Array, *, tile: int) -> PrefillWork:
    """The work list of the rows with more than one query, `tile` queries per item; q_lens is i32[S]."""
    return PrefillWork(jnp.cumsum(jnp.where(q_lens > 1, ceil_div(q_lens, tile), 0), dtype=jnp.int32))


def shared_work(
    q_lens: jax.Array, kv_lens: jax.Array, page_indices: jax.Array, *, tile: int, page_size: int, least: int
) -> SharedWork:
    """The work list of what rows with one query have in common.

    Rows are a group if the pages of their first `tile` keys are the same; it shares what all its rows share. Each row
    keeps a key of its own.

    Args:
      q_lens, kv_lens: i32[S].
      page_indices: i32[S, max_pages].
      tile: keys per item.
      page_size: tokens per page.
      least: rows of a group at least.
    """
    rows = jnp.arange(kv_lens.shape[0], dtype=jnp.int32)
    able = (q_lens == 1) & (kv_lens > tile)
    begin = page_indices[:, : max(tile // page_size, 1)]
    same = able[:, None] & able & jnp.all(begin[:, None] == begin, axis=-1)  # [S, S]: each row's group
    leaders = jnp.where(able, jnp.argmax(same, axis=1).astype(jnp.int32), rows)

    differs = jnp.pad(page_indices != page_indices[leaders], ((0, 0), (0, 1)), constant_values=True)
    common = jnp.minimum(jnp.argmax(differs, axis=1) * page_size, jnp.minimum(kv_lens, kv_lens[leaders]) - 1)
    common = jnp.min(jnp.where(same, common, jnp.iinfo(jnp.int32).max), axis=1) // tile * tile
    lens = jnp.where(jnp.sum(same, axis=1) >= least, common, 0).astype(jnp.int32)
    return SharedWork(leaders, lens, jnp.cumsum(jnp.where(leaders == rows, lens // tile, 0), dtype=jnp.int32))


def first_key(position: jax.Array, chunk: int, sliding_window: int | None) -> jax.Array:
    """The first key position to read for a query at `position`: a multiple of `chunk`, at or before the first seen."""
    if sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position + 1 - sliding_window, 0) // chunk * chunk


def ceil_div(a: jax.Array, b: int) -> jax.Array:
    """Ceiling of a / b."""
    return (a + (b - 1)) // b
