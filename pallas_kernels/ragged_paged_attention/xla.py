"""Ragged paged attention in plain XLA operations: flash-style loops whose trip counts are data.

The cost follows the sum of the contexts, whatever the shape of the page table. Rows with one query take part in a flat
list of (row, tile of keys); a window of consecutive items is one loop iteration, whatever rows they belong to. Rows with
more queries are cut in tiles of queries, each of which loops over the tiles of keys that it sees.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention import work

_LOWEST = -1e30  # stands for -inf: differences of it stay finite


class _Pool(NamedTuple):
    """One layer's pages, read in chunks of tokens.

    Attributes:
      chunks: [L * P * page_size / chunk, chunk, K, 2H]
      page_indices: i32[S, max_pages]
      base: i32[] index of the layer's first chunk.
      page_size, chunk: tokens.
    """

    chunks: jax.Array
    page_indices: jax.Array
    base: jax.Array
    page_size: int
    chunk: int


@functools.partial(jax.jit, static_argnames=("sm_scale", "sliding_window", "soft_cap", "decode_only"))
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
) -> jax.Array:
    """See `pallas_kernels.ragged_paged_attention.api`; the arguments are taken as checked."""
    tokens, heads, head_dim = q.shape
    layers, pages, page_size, kv_heads, _ = kv_pages.shape
    kv_heads //= 2
    tile = 128
    chunk = min(page_size, tile)
    pool = _Pool(
        kv_pages.reshape(-1, chunk, kv_heads, 2 * head_dim),
        page_indices,
        layer[0] * (pages * page_size // chunk),
        page_size,
        chunk,
    )
    queries = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    queries = queries * (sm_scale if k_scale is None else sm_scale * k_scale)
    sink = jnp.full((heads,), _LOWEST) if sinks is None else sinks.astype(jnp.float32)
    sink = sink.reshape(kv_heads, -1)
    q_lens = work.query_lens(cu_q_lens, num_seqs)
    args = (queries, pool, kv_lens, cu_q_lens, q_lens, sink)
    out = _decode(*args, sliding_window=sliding_window, soft_cap=soft_cap, tile=tile)
    if not decode_only:
        out = _prefill(*args, out, sliding_window=sliding_window, soft_cap=soft_cap, tile=tile)
    if v_scale is not None:
        out = out * v_scale
    return out.reshape(tokens, heads, head_dim).astype(q.dtype)


def _decode(queries, pool, kv_lens, cu_q_lens, q_lens, sink, *, sliding_window, soft_cap, tile):
    """[T, K, G, H] float32 output of the rows with one query; zero elsewhere."""
    tokens, kv_heads, group, head_dim = queries.shape
    rows = kv_lens.shape[0]
    width = min(32, max(4, rows))
    plan = work.decode_work(q_lens, kv_lens, tile=tile, chunk=pool.chunk, sliding_window=sliding_window)
    row_queries = queries[jnp.minimum(cu_q_lens[plan.rows], tokens - 1)]
    row_lens = kv_lens[plan.rows]

    def window(state):
        index, high, total, acc = state
        items = index * width + jnp.arange(width)
        number = work.find(plan.ends, items)
        before = jnp.where(number > 0, plan.ends[number - 1], 0)
        positions = (plan.starts[number] + (items - before) * tile)[:, None] + jnp.arange(tile)
        lens = row_lens[number]
        seen = (positions < lens[:, None]) & (items < plan.total)[:, None]
        if sliding_window is not None:
            seen &= positions >= (lens - sliding_window)[:, None]
        k, v = _read(pool, plan.rows[number], positions, seen)
        scores = jnp.einsum("wkgh,wkch->wkgc", row_queries[number], k)
        weights, item_high, item_total = _partial_softmax(scores, seen[:, None, None, :], soft_cap)
        item_acc = jnp.einsum("wkgc,wkch->wkgh", weights, v)

        # Merge the items of each row: the window touches at most `width` rows, from the first item's on.
        base = number[0]
        owns = (jnp.arange(width)[:, None] == number - base) & (items < plan.total)
        old_high = lax.dynamic_slice_in_dim(high, base, width)
        old_total = lax.dynamic_slice_in_dim(total, base, width)
        old_acc = lax.dynamic_slice_in_dim(acc, base, width)
        new_high = jnp.maximum(old_high, jnp.max(jnp.where(owns[:, :, None, None], item_high, _LOWEST), axis=1))
        keep = jnp.exp(old_high - new_high)
        share = jnp.where(owns[:, :, None, None], jnp.exp(item_high - new_high[:, None]), 0)
        new_total = old_total * keep + jnp.einsum("rwkg,wkg->rkg", share, item_total)
        new_acc = old_acc * keep[..., None] + jnp.einsum("rwkg,wkgh->rkgh", share, item_acc)
        return (
            index + 1,
            lax.dynamic_update_slice_in_dim(high, new_high, base, 0),
            lax.dynamic_update_slice_in_dim(total, new_total, base, 0),
            lax.dynamic_update_slice_in_dim(acc, new_acc, base, 0),
        )

    padded = rows + width
    high = jnp.broadcast_to(sink, (padded, kv_heads, group))
    state = (jnp.int32(0), high, jnp.where(high > _LOWEST, 1.0, 0.0), jnp.zeros((padded, kv_heads, group, head_dim)))
    _, _, total, acc = lax.while_loop(lambda state: state[0] * width < plan.total, window, state)
    row_out = acc / jnp.maximum(total, 1e-30)[..., None]
    token_row = work.find(jnp.cumsum(q_lens), jnp.arange(tokens))
    decodes = (q_lens[token_row] == 1) & (cu_q_lens[token_row] == jnp.arange(tokens))
    return jnp.where(decodes[:, None, None, None], row_out[plan.ordinals[token_row]], 0)


def _prefill(queries, pool, kv_lens, cu_q_lens, q_lens, sink, out, *, sliding_window, soft_cap, tile):
    """`out` [T, K, G, H] with the output of the rows with more than one query put in."""
    tokens, kv_heads, group, head_dim = queries.shape
    q_tile = 64
    plan = work.prefill_work(q_lens, tile=q_tile)
    queries = jnp.pad(queries, ((0, q_tile), (0, 0), (0, 0), (0, 0)))
    out = jnp.pad(out, ((0, q_tile), (0, 0), (0, 0), (0, 0)))

    def query_tile(state):
        item, out = state
        row = work.find(plan.ends, item)
        offset = (item - jnp.where(row > 0, plan.ends[row - 1], 0)) * q_tile
        token = cu_q_lens[row] + offset
        first = kv_lens[row] - q_lens[row] + offset  # position of the tile's first query
        q_positions = first + jnp.arange(q_tile)
        length = jnp.minimum(kv_lens[row], first + q_tile)
        tile_queries = lax.dynamic_slice_in_dim(queries, token, q_tile)

        def key_tile(state):
            start, high, total, acc = state
            positions = start + jnp.arange(tile)
            seen = (positions <= q_positions[:, None]) & (positions < length)
            if sliding_window is not None:
                seen &= positions > q_positions[:, None] - sliding_window
            k, v = _read(pool, row[None], positions[None], (positions < length)[None])
            scores = jnp.einsum("tkgh,kch->kgtc", tile_queries, k[0])
            weights, tile_high, tile_total = _partial_softmax(scores, seen, soft_cap)
            new_high = jnp.maximum(high, tile_high)
            keep, share = jnp.exp(high - new_high), jnp.exp(tile_high - new_high)
            tile_acc = jnp.einsum("kgtc,kch->kgth", weights, v[0])
            new_acc = acc * keep[..., None] + tile_acc * share[..., None]
            return start + tile, new_high, total * keep + tile_total * share, new_acc

        high = jnp.broadcast_to(sink[:, :, None], (kv_heads, group, q_tile))
        state = (
            work.first_key(first, pool.chunk, sliding_window),
            high,
            jnp.where(high > _LOWEST, 1.0, 0.0),
            jnp.zeros((kv_heads, group, q_tile, head_dim)),
        )
        _, _, total, acc = lax.while_loop(lambda state: state[0] < length, key_tile, state)
        tile_out = (acc / jnp.maximum(total, 1e-30)[..., None]).transpose(2, 0, 1, 3)
        live = (offset + jnp.arange(q_tile) < q_lens[row])[:, None, None, None]
        old = lax.dynamic_slice_in_dim(out, token, q_tile)
        return item + 1, lax.dynamic_update_slice_in_dim(out, jnp.where(live, tile_out, old), token, 0)

    _, out = lax.while_loop(lambda state: state[0] < plan.total, query_tile, (jnp.int32(0), out))
    return out[:tokens]


def _read(pool: _Pool, rows: jax.Array, positions: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [W, K, C, H] in float32 of the positions i32[W, C] of rows i32[W]; zero where `valid` is false.

    Each row of `positions` counts up from a multiple of the chunk size.
    """
    width, count = positions.shape
    chunk_positions = positions[:, :: pool.chunk]
    page = pool.page_indices.at[rows[:, None], chunk_positions // pool.page_size].get(mode="clip")
    index = page * (pool.page_size // pool.chunk) + chunk_positions % pool.page_size // pool.chunk + pool.base
    tiles = pool.chunks.at[index].get(mode="clip")
    kv_heads, both = tiles.shape[-2:]
    tiles = tiles.reshape(width, count, kv_heads, both).transpose(0, 2, 1, 3).astype(jnp.float32)
    tiles = jnp.where(valid[:, None, :, None], tiles, 0)  # values too: 0 * NaN is NaN
    return tiles[..., : both // 2], tiles[..., both // 2 :]


def _partial_softmax(scores, seen, soft_cap):
    """Weights (not normalized), their maximum score and their sum over the last axis; zero weight where not seen."""
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, _LOWEST)
    high = jnp.max(scores, axis=-1)
    weights = jnp.where(seen, jnp.exp(scores - high[..., None]), 0)
    return weights, high, jnp.sum(weights, axis=-1)
