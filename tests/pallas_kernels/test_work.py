"""The work lists: every key that is seen is in exactly one item, and there are no more items than the contexts need."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention.work import decode_work, prefill_work, query_lens, shared_work

TILE, CHUNK = 64, 16


def plan(q_lens, kv_lens, sliding_window=None, shared: int | list[int] = 0):
    q_lens, kv_lens = (jnp.asarray(x, jnp.int32) for x in (q_lens, kv_lens))
    shared = jnp.broadcast_to(jnp.int32(shared), kv_lens.shape)
    return decode_work(q_lens, kv_lens, shared, tile=TILE, chunk=CHUNK, sliding_window=sliding_window)


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


def test_items_begin_behind_what_is_shared():
    work = plan([1, 1, 1], [300, 64 + 1, 200], shared=[128, 64, 0])
    number, keys = (x.tolist() for x in work.tiles(jnp.arange(int(work.total)), TILE))
    assert list(zip(number, keys, strict=True)) == [
        *((0, key) for key in (128, 192, 256)),
        (1, 64),
        *((2, key) for key in (0, 64, 128, 192)),
    ]


def common_tiles(rows, kv_lens, page_indices, page_size):
    """Tiles of keys that some rows have in common, one key of each left out."""
    keys = np.arange(min(kv_lens[list(rows)]) - 1)
    places = page_indices[:, keys // page_size] * page_size + keys % page_size
    differs = np.append((places[list(rows)] != places[rows[0]]).any(axis=0), True)
    return int(differs.argmax()) // TILE


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_rows_share_is_found(data):
    page_size, count, width, least = data.draw(st.sampled_from([8, 16, 64, 128])), 9, 512, 3
    kv_lens = np.array(
        data.draw(st.lists(st.sampled_from([0, 1, 64, 65, 128, 129, 200, 400, 512]), min_size=count, max_size=count))
    )
    q_lens = np.array(data.draw(st.lists(st.sampled_from([0, 1, 1, 1, 1, 2]), min_size=count, max_size=count)))
    page_indices = np.arange(count * (width // page_size)).reshape(count, -1)
    for row in range(1, count):
        other, pages = data.draw(st.integers(0, row - 1)), data.draw(st.integers(0, width)) // page_size
        page_indices[row, :pages] = page_indices[other, :pages]

    arrays = (jnp.asarray(x, jnp.int32) for x in (q_lens, kv_lens, page_indices))
    work = shared_work(*arrays, tile=TILE, page_size=page_size, least=least)
    want_lens, want_items = np.zeros(count, int), []
    groups = {}
    for row in range(count):
        if q_lens[row] == 1 and kv_lens[row] > TILE:
            groups.setdefault(tuple(page_indices[row, : max(TILE // page_size, 1)]), []).append(row)
    for rows in groups.values():
        if len(rows) >= least and (tiles := common_tiles(rows, kv_lens, page_indices, page_size)):
            want_lens[rows] = tiles * TILE
            want_items += [(rows[0], tile * TILE) for tile in range(tiles)]
            assert np.asarray(work.leaders)[rows].tolist() == [rows[0]] * len(rows)
    assert np.asarray(work.lens).tolist() == want_lens.tolist()
    items = [work.tile(jnp.int32(item), TILE) for item in range(int(work.total))]
    assert [(int(leader), int(key)) for leader, key in items] == want_items


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
