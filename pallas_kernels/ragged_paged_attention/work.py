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


def query_lens(cu_q_lens: jax.Array, num_seqs: jax.Array) -> jax.Array:
    """i32[S] queries per row; zero for padding rows."""
    lens = cu_q_lens[1:] - cu_q_lens[:-1]
    return jnp.where(jnp.arange(lens.shape[0]) < num_seqs[0], lens, 0)


def find(ends: jax.Array, items: jax.Array) -> jax.Array:
    """The entry of `ends` (cumulative counts) that owns each item; the last entry if none does."""
    owner = jnp.searchsorted(ends, items, side="right", method="compare_all").astype(jnp.int32)
    return jnp.minimum(owner, ends.shape[0] - 1)


def decode_work(
    q_lens: jax.Array, kv_lens: jax.Array, *, tile: int, chunk: int, sliding_window: int | None
) -> DecodeWork:
    """The work list of the rows with one query.

    Args:
      q_lens, kv_lens: i32[S].
      tile: keys per item.
      chunk: every tile starts at a multiple of it.
      sliding_window: keys seen by a query; the tiles before them are not in the list.
    """
    active = (q_lens == 1) & (kv_lens > 0)
    counts = jnp.cumsum(active, dtype=jnp.int32)
    rows = find(counts, jnp.arange(counts.shape[0]))
    lens = kv_lens[rows]
    starts = first_key(lens - 1, chunk, sliding_window)
    tiles = jnp.where(jnp.arange(rows.shape[0]) < counts[-1], ceil_div(lens - starts, tile), 0)
    return DecodeWork(rows, jnp.maximum(counts - 1, 0), starts, jnp.cumsum(tiles, dtype=jnp.int32))


def prefill_work(q_lens: jax.Array, *, tile: int) -> PrefillWork:
    """The work list of the rows with more than one query, `tile` queries per item; q_lens is i32[S]."""
    return PrefillWork(jnp.cumsum(jnp.where(q_lens > 1, ceil_div(q_lens, tile), 0), dtype=jnp.int32))


def first_key(position: jax.Array, chunk: int, sliding_window: int | None) -> jax.Array:
    """The first key position to read for a query at `position`: a multiple of `chunk`, at or before the first seen."""
    if sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position + 1 - sliding_window, 0) // chunk * chunk


def ceil_div(a: jax.Array, b: int) -> jax.Array:
    """Ceiling of a / b."""
    return (a + (b - 1)) // b
