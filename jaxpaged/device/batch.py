"""A `Step` as padded arrays: the only translation from host to device.

`pack` runs on the host and yields one int32 buffer; `unpack` is its inverse inside the jitted step. They share
one layout: slots | starts | query lengths | sampling rows | new blocks (3 columns) | counts of rows, samples and steps.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.core.step import Step
from jaxpaged.device.buckets import Bucket
from jaxpaged.device.slots import Slots

_OUT_OF_RANGE = 2**31 - 1  # no index: a scatter drops it


class Batch(NamedTuple):
    """A step on the device; S rows and T tokens, padded to a bucket.

    Attributes:
      slots: i32[S], slot of each row; padding rows have the scratch slot.
      starts: i32[S], position of each row's first token.
      query_lens: i32[S], tokens of each row in this step; 0 for padding rows.
      sample_rows: i32[S], the rows that yield a token, first; then S.
      new_blocks: i32[U, 3], (slot, index, page) to append to block tables; padding has an index out of range.
      num_rows, num_samples: i32[], live rows and rows that sample.
      num_steps: i32[], how many the step is.
    """

    slots: jax.Array
    starts: jax.Array
    query_lens: jax.Array
    sample_rows: jax.Array
    new_blocks: jax.Array
    num_rows: jax.Array
    num_samples: jax.Array
    num_steps: jax.Array


class SampleRows(NamedTuple):
    """The R rows that a step samples, first in their order; then padding.

    Attributes:
      slots: i32[R], of each row; padding has the scratch slot.
      positions: i32[R], of the new token in its sequence; of padding beyond every history.
    """

    slots: jax.Array
    positions: jax.Array


class TokenLayout(NamedTuple):
    """Where the step's T packed tokens come from and go to.

    Attributes:
      token_ids, positions: i32[T].
      slot_mapping: i32[T], page * page_size + offset; in page 0 for padding.
      query_start_loc: i32[S + 1].
      kv_lens: i32[S], tokens in cache per row, this step's included.
      page_indices: i32[S, max_pages].
    """

    token_ids: jax.Array
    positions: jax.Array
    slot_mapping: jax.Array
    query_start_loc: jax.Array
    kv_lens: jax.Array
    page_indices: jax.Array


def packed_size(bucket: Bucket, block_size: int) -> int:
    """Length of the packed buffer of a bucket."""
    return 4 * bucket.rows + 3 * bucket.max_new_blocks(block_size) + 3


def pack(step: Step, bucket: Bucket, *, scratch_slot: int, block_size: int) -> np.ndarray:
    """The step's integers in one int32 buffer of `packed_size(bucket)`, a single transfer."""
    rows, padded, num_blocks = len(step.slots), bucket.rows, len(step.new_blocks)
    buffer = np.zeros(packed_size(bucket, block_size), np.int32)
    head = buffer[: 4 * padded].reshape(4, padded)
    head[0, :rows] = step.slots
    head[0, rows:] = scratch_slot
    head[1, :rows] = step.starts
    head[2, :rows] = step.num_tokens
    sample_rows = np.arange(rows) if all(step.samples) else np.flatnonzero(step.samples)
    head[3, : len(sample_rows)] = sample_rows
    head[3, len(sample_rows) :] = padded
    blocks = buffer[4 * padded : -3].reshape(-1, 3)
    assert num_blocks <= len(blocks), (num_blocks, bucket)
    if num_blocks:
        blocks[:num_blocks] = step.new_blocks
    blocks[num_blocks:, 1] = _OUT_OF_RANGE
    buffer[-3:] = rows, len(sample_rows), step.num_steps
    return buffer


def unpack(packed: jax.Array, bucket: Bucket) -> Batch:
    """The inverse of `pack`, on the device."""
    head = packed[: 4 * bucket.rows].reshape(4, bucket.rows)
    blocks = packed[4 * bucket.rows : -3].reshape(-1, 3)
    return Batch(head[0], head[1], head[2], head[3], blocks, packed[-3], packed[-2], packed[-1])


def append_blocks(slots: Slots, batch: Batch) -> Slots:
    """Enters the step's new blocks into the block tables."""
    slot, index, page = batch.new_blocks.T
    return slots._replace(block_table=slots.block_table.at[slot, index].set(page, mode="drop"))


def lay_out(slots: Slots, batch: Batch, bucket: Bucket, page_size: int) -> TokenLayout:
    """Expands rows to packed tokens, reading token ids from the slots' history."""
    query_start_loc = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(batch.query_lens, dtype=jnp.int32)])
    token = jnp.arange(bucket.tokens, dtype=jnp.int32)
    if bucket.decode_only:
        row, live = token, token < batch.num_rows
    else:
        row = jnp.searchsorted(query_start_loc[1:], token, side="right").astype(jnp.int32)
        live = token < query_start_loc[-1]
        row = jnp.minimum(row, bucket.rows - 1)
    # Padding tokens read position 0 of the scratch slot, whose block table is all page 0.
    slot = jnp.where(live, batch.slots[row], slots.history.shape[0] - 1)
    position = jnp.where(live, batch.starts[row] + token - query_start_loc[row], 0)
    page = slots.block_table[slot, position // page_size]
    return TokenLayout(
        token_ids=slots.history[slot, position],
        positions=position,
        slot_mapping=page * page_size + position % page_size,
        query_start_loc=query_start_loc,
        kv_lens=jnp.where(batch.query_lens > 0, batch.starts + batch.query_lens, 0),
        page_indices=slots.block_table[batch.slots],
    )


def rows_to_sample(slots: Slots, batch: Batch, num_rows: int) -> SampleRows:
    """What sampling has to know of the batch; R is `num_rows`, at least S."""
    num_slots, max_len = slots.history.shape
    padded = len(batch.sample_rows)
    rows = jnp.pad(batch.sample_rows, (0, num_rows - padded), constant_values=padded)
    return SampleRows(
        slots=batch.slots.at[rows].get(mode="fill", fill_value=num_slots - 1),
        positions=(batch.starts + batch.query_lens).at[rows].get(mode="fill", fill_value=max_len),
    )


def record_tokens(slots: Slots, rows: SampleRows, tokens: jax.Array) -> Slots:
    """Appends sampled `tokens`, i32[R], to the histories; those of padding are dropped."""
    return slots._replace(history=slots.history.at[rows.slots, rows.positions].set(tokens, mode="drop"))
