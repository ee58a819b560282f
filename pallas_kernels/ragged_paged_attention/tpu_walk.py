"""The order in which the tpu implementation works: items of queries, and for each of them tiles of keys."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.padding import power_of_two

LANES, SUBLANES = 128, 8  # of a TPU's vector register
LEAD = 4  # tiles between the copy of a tile's page numbers and the copies of its pages: what hides the first's latency


@dataclass(frozen=True)
class Plan:
    """What is static in a launch.

    Attributes:
      several: whether it serves the rows with several queries, or those with one.
      queries: per item.
      keys: per tile.
      depth: tiles in the ring.
      unroll: copies that are started without a jump between them.
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
    unroll: int
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
        """Rows of an item's matrix of queries, padded: those of one token are neighbours."""
        return -(-self.queries * self.group // SUBLANES) * SUBLANES

    @property
    def heads(self) -> int:
        """KV heads that are worked on together: more in flight hides latency, where each has little work."""
        return 1 if self.several else max(n for n in range(1, 9) if self.kv_heads % n == 0)

    @property
    def lanes(self) -> int:
        """Numbers of a head that lie side by side in a buffer of keys and values."""
        return self.head_dim if self.head_dim % LANES else LANES

    @property
    def strided(self) -> bool:
        """Whether Mosaic can read one head of a buffer of 16-bit numbers in strides; else it moves rows about."""
        return self.lanes <= LANES and (self.kv_heads in (1, 2) or self.kv_heads % 4 == 0)

    @property
    def chunk(self) -> int:
        """Tokens copied at a time."""
        return min(self.page_size, self.keys)

    @property
    def chunks(self) -> int:
        """Copies of keys and values per tile, of as many pages."""
        return self.keys // self.chunk

    @property
    def window(self) -> int:
        """Page numbers copied per tile: copies begin at multiples of LANES, up to LANES - 1 before the tile's first."""
        return -(-(self.chunks + LANES - 1) // LANES) * LANES

    @property
    def known(self) -> int:
        """Tiles that are kept in SMEM, from the one that is worked on to the furthest; a power of two."""
        return power_of_two(self.depth + LEAD)


class Batch(NamedTuple):
    """Scalars of the batch, in SMEM: i32 but for `scales`, f32[2], of scores (to units of log2) and of values."""

    layer: Any
    num_seqs: Any
    cu_q_lens: Any
    kv_lens: Any
    scales: Any


class Tile(NamedTuple):
    """A tile of keys, and the item whose queries see it.

    Attributes:
      row: of the batch; beyond the last one, there is no tile.
      offset: of the item's first query among the row's `q_len`.
      token, position: of the item's first query, in the batch and in its sequence.
      start, end: the keys that the item reads: from a multiple of the chunk to one past the last.
      key: position of the tile's first key.
    """

    row: jax.Array
    offset: jax.Array
    q_len: jax.Array
    token: jax.Array
    position: jax.Array
    start: jax.Array
    end: jax.Array
    key: jax.Array


class Walk(NamedTuple):
    """The order in which a core takes the tiles of the batch."""

    plan: Plan
    batch: Batch

    def first(self) -> Tile:
        return self._seek(*self._look(jnp.int32(0), self._first_offset(jnp.int32(0))))

    def next(self, tile: Tile) -> Tile:
        key = tile.key + self.plan.keys
        return self._seek(key < tile.end, tile._replace(key=key))

    def live(self, row: jax.Array) -> jax.Array:
        return row < self.batch.num_seqs[0]

    def _first_offset(self, row: jax.Array) -> jax.Array:
        """Where this core begins in a row: cores take turns at the items of a row, and at rows of one item."""
        if self.plan.cores == 1:
            return jnp.int32(0)
        return (row + pl.program_id(0)) % self.plan.cores * self.plan.queries

    def _seek(self, found: jax.Array, tile: Tile) -> Tile:
        """This tile if it is one, else the next item's first."""

        def skip(state):
            _, tile = state
            row, offset = tile.row + 1, self._first_offset(tile.row + 1)
            if self.plan.several:
                further = tile.offset + self.plan.cores * self.plan.queries
                stay = further < tile.q_len
                row, offset = jnp.where(stay, tile.row, row), jnp.where(stay, further, offset)
            return self._look(row, offset)

        return lax.while_loop(lambda state: ~state[0], skip, (found, tile))[1]

    def _look(self, row: jax.Array, offset: jax.Array) -> tuple[jax.Array, Tile]:
        """The first tile of the item here, and whether there is one; yes too beyond the last row."""
        plan, batch = self.plan, self.batch
        known = jnp.minimum(row, batch.kv_lens.shape[0] - 1)
        first, kv_len = batch.cu_q_lens[known], batch.kv_lens[known]
        q_len = batch.cu_q_lens[known + 1] - first
        position = kv_len - q_len + offset
        start = jnp.int32(0)
        if plan.sliding_window is not None:
            start = jnp.maximum(position - plan.sliding_window + 1, 0) // plan.chunk * plan.chunk
        end = jnp.minimum(kv_len, position + plan.queries)
        mine = (q_len > 1) & (offset < q_len) if plan.several else (q_len == 1) & (offset == 0)
        tile = Tile(row, offset, q_len, first + offset, position, start, end, start)
        return mine | (row >= batch.num_seqs[0]), tile
