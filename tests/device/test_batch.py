"""pack -> unpack -> lay_out against a plain Python account of the same step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.step import Step
from jaxpaged.device import batch as batches
from jaxpaged.device.buckets import Bucket
from jaxpaged.device.slots import empty_slots

SLOTS, MAX_LEN, PAGE, MIXED, DECODE = 6, 64, 4, Bucket(16, 4), Bucket(4, 4)


@jax.jit
def lay_out_mixed(slots, packed):
    batch = batches.unpack(packed, MIXED)
    slots = batches.append_blocks(slots, batch)
    layout = batches.lay_out(slots, batch, MIXED, PAGE)
    return (
        slots,
        layout,
        batches.record_tokens(slots, batches.rows_to_sample(slots, batch, 6), jnp.arange(100, 106)),
    )


@jax.jit
def lay_out_decode(slots, packed):
    batch = batches.unpack(packed, DECODE)
    slots = batches.append_blocks(slots, batch)
    layout = batches.lay_out(slots, batch, DECODE, PAGE)
    return (
        slots,
        layout,
        batches.record_tokens(slots, batches.rows_to_sample(slots, batch, 4), jnp.arange(100, 104)),
    )


def filled_slots():
    slots = empty_slots(SLOTS, MAX_LEN, MAX_LEN // PAGE)
    history = np.arange((SLOTS + 1) * MAX_LEN).reshape(SLOTS + 1, MAX_LEN).astype(np.int32)
    table = 1 + np.arange((SLOTS + 1) * MAX_LEN // PAGE).reshape(SLOTS + 1, -1).astype(np.int32)
    history[-1] = table[-1] = 0
    return slots._replace(history=jnp.asarray(history), block_table=jnp.asarray(table))


@st.composite
def steps(draw):
    rows = draw(st.integers(0, 4))
    lens = sorted(draw(st.lists(st.integers(1, 4), min_size=rows, max_size=rows)))
    return Step(
        requests=[None] * rows,
        slots=draw(st.permutations(range(SLOTS)))[:rows],
        starts=[draw(st.integers(0, MAX_LEN - 5)) for _ in range(rows)],
        num_tokens=lens,
        samples=[draw(st.booleans()) for _ in range(rows)],
        total_tokens=sum(lens),
    )


@settings(max_examples=60, deadline=None)
@given(steps())
def test_layout_matches_the_step(step):
    only_decodes = step.total_tokens == len(step.slots)
    bucket, lay_out = (DECODE, lay_out_decode) if only_decodes else (MIXED, lay_out_mixed)
    packed = batches.pack(step, bucket, scratch_slot=SLOTS, block_size=PAGE)
    assert len(packed) == batches.packed_size(bucket, PAGE)
    before = filled_slots()
    slots, layout, after = jax.device_get(lay_out(before, packed))
    history, table = np.asarray(before.history), np.asarray(before.block_table)
    np.testing.assert_array_equal(slots.block_table, table)
    where = [(s, p) for s, a, n in zip(step.slots, step.starts, step.num_tokens, strict=True) for p in range(a, a + n)]
    live = len(where)
    assert layout.positions[:live].tolist() == [p for _, p in where]
    assert layout.token_ids[:live].tolist() == [history[s, p] for s, p in where]
    assert layout.slot_mapping[:live].tolist() == [table[s, p // PAGE] * PAGE + p % PAGE for s, p in where]
    assert (layout.slot_mapping[live:] < PAGE).all(), "padding must write to the scratch page"
    rows = len(step.slots)
    assert layout.kv_lens.tolist() == [a + n for a, n in zip(step.starts, step.num_tokens, strict=True)] + [0] * (
        4 - rows
    )
    assert layout.query_start_loc.tolist() == [*np.cumsum([0, *step.num_tokens]), *[live] * (4 - rows)]
    np.testing.assert_array_equal(layout.page_indices[:rows], table[step.slots])
    expected = history.copy()
    for i, row in enumerate(np.flatnonzero(step.samples)):
        expected[step.slots[row], step.starts[row] + step.num_tokens[row]] = 100 + i
    np.testing.assert_array_equal(after.history, expected)


def test_new_blocks_are_entered_before_use():
    step = Step([None], [2], [8], [1], [True], new_blocks=[(2, 2, 77), (3, 0, 5)], total_tokens=1)
    packed = batches.pack(step, DECODE, scratch_slot=SLOTS, block_size=PAGE)
    slots, layout, _ = lay_out_decode(filled_slots(), packed)
    assert (slots.block_table[2, 2], slots.block_table[3, 0]) == (77, 5)
    assert layout.slot_mapping[0] == 77 * PAGE


def test_more_new_blocks_than_the_bucket_holds_is_our_bug():
    step = Step([None], [0], [0], [1], [True], new_blocks=[(0, i, 1) for i in range(6)], total_tokens=1)
    with pytest.raises(AssertionError):
        batches.pack(step, DECODE, scratch_slot=SLOTS, block_size=PAGE)
