"""The work lists: every key that is seen is in exactly one item, and there are no more items than the contexts need."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention.work import decode_work, prefill_work, query_lens

TILE, CHUNK = 64, 16


def plan(q_lens, kv_lens, sliding_window=None):
    lens = (jnp.asarray(x, jnp.int32) for x in (q_lens, kv_lens))
    return decode_work(*lens, tile=TILE, chunk=CHUNK, sliding_window=sliding_window)


def test_decode_items_follow_the_sum_of_the_contexts():
    """One long row among short ones costs its own tiles, not the table's width times the rows."""
    kv_lens = np.array([3] * 31 + [4096])
    assert plan([1] * 32, kv_lens).total == 31 + 4096 // TILE
    assert plan([1] * 32, [256] * 32).total == 32 * 256 // TILE
    assert plan([1] * 4, [64, 65, 1, 128]).total == 1 + 2 + 1 + 2


def test_rows_without_one_query_have_no_items():
    assert plan([0, 1, 3, 0, 1], [500, 10, 500, 0, 10]).total == 2
    assert plan([1, 1], [0, 0]).total == 0


@pytest.mark.parametrize("sliding_window", [None, 1, 40, 64, 100])
def test_items_cover_what_is_seen_once(sliding_window):
    q_lens = np.array([1, 0, 1, 1, 7, 1])
    kv_lens = np.array([1, 9, 300, 64, 50, 129])
    work = plan(q_lens, kv_lens, sliding_window)
    number, keys = work.tiles(jnp.arange(int(work.total)), TILE)
    rows = np.asarray(work.rows)[np.asarray(number)]
    assert (np.asarray(keys) % CHUNK == 0).all()
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        first = 0 if sliding_window is None else max(0, kv_len - sliding_window)
        read = np.concatenate([[], *(np.arange(key, key + TILE) for key in np.asarray(keys)[rows == row])])
        if q_len != 1:
            assert read.size == 0
            continue
        assert len(set(read)) == len(read)
        assert set(range(first, kv_len)) <= set(read)
        assert read.size < kv_len - first + CHUNK + TILE


def test_rows_are_numbered_without_gaps():
    """What the merge of consecutive items relies on."""
    work = plan([1, 0, 0, 1, 1], [100, 5, 5, 1, 200])
    number, _ = work.tiles(jnp.arange(int(work.total)), TILE)
    assert set(np.diff(np.asarray(number))) <= {0, 1}
    np.testing.assert_array_equal(np.asarray(work.rows)[:3], [0, 3, 4])
    np.testing.assert_array_equal(np.asarray(work.ordinals)[[0, 3, 4]], [0, 1, 2])


def test_prefill_items_follow_the_queries():
    work = prefill_work(jnp.array([1, 0, 2, 64, 65, 1], jnp.int32), tile=64)
    assert work.total == 1 + 1 + 2
    placed = [tuple(int(x) for x in work.tile(jnp.int32(item), 64)) for item in range(4)]
    assert placed == [(2, 0), (3, 0), (4, 0), (4, 64)]


def test_padding_rows_have_no_queries():
    np.testing.assert_array_equal(query_lens(jnp.array([0, 1, 4, 99, 3]), jnp.array([2])), [1, 3, 0, 0])
