"""Ragged paged attention in plain XLA operations: flash-style loops whose trip counts are data.

The cost follows the sum of the contexts, whatever the shape of the page table. Rows with one query take part in a
flat list of (row, tile of keys); a window of consecutive items is one loop iteration, whatever rows they belong to.
Rows with more queries are cut in tiles of queries, each of which loops over the tiles of keys that it sees. In programs
that only decode, keys that many rows have in common, as behind a system prompt, are read once for all of them.

The sizes below and the layouts of keys [.., H, C] and values [.., C, H] are what was fastest on CPUs.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pool import to_float32
from pallas_kernels.ragged_paged_attention import work

DECODE_KEYS = 64  # per item
DECODE_ITEMS = (4, 32)  # per loop iteration: at least, at most; as many as there are rows
SHARED_KEYS = 64  # per loop iteration, common to many rows
SHARED_ROWS = 4  # that have them in common, at least; and a quarter of all, since the products are for all
SHARED_FROM = 8  # rows: smaller programs do not look
PREFILL_QUERIES = 64  # per item, at most
PREFILL_KEYS = (512, 128)  # per loop iteration: as long as there are so many, and for the rest

_LOWEST = -1e30  # stands for -inf: differences of it stay finite


class _Pool(NamedTuple):
    """One layer's pages, read in chunks of tokens.

    Attributes:
      kv_pages: [L, P, page_size, 2K, H].
      page_indices: i32[S, max_pages].
      layer: i32[].
    """

    kv_pages: jax.Array
    page_indices: jax.Array
    layer: jax.Array

    def chunk(self, tile: int) -> int:
        """Tokens read at a time for tiles of `tile` keys, both powers of two."""
        return min(self.kv_pages.shape[2], tile)

    def read(self, rows: jax.Array, positions: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The keys [W, K, H, C] and values [W, K, C, H] in float32 of some positions of some rows.

        Args:
          rows: i32[W].
          positions: i32[W, C] token positions; each row counts up from a multiple of `chunk(C)`.
          live: bool[W, C]; the value is zero where it is false. The key may be anything there, NaN included.
        """
        _, pages, page_size, heads, head_dim = self.kv_pages.shape
        width, count = positions.shape
        chunk = self.chunk(count)
        firsts = positions[:, ::chunk]
        page = _take(self.page_indices, rows[:, None], firsts // page_size)
        index = ((self.layer * pages + page) * page_size + firsts % page_size) // chunk

        chunks = self.kv_pages.reshape(-1, chunk, heads // 2, 2 * head_dim)
        kv = _take(chunks, index).reshape(width, count, heads // 2, 2 * head_dim)
        keys, values = kv[..., :head_dim], kv[..., head_dim:]
        values = _zero_unless(live[..., None, None], values)  # 0 * NaN is NaN
        return to_float32(keys).transpose(0, 2, 3, 1), to_float32(values).transpose(0, 2, 1, 3)


class _Scores(NamedTuple):
    """What is done to scores, and what a row starts from.

    Attributes:
      sinks: f32[K, G] or None.
      sliding_window, soft_cap: as in the operation.
    """

    sinks: jax.Array | None
    sliding_window: int | None
    soft_cap: float | None

    def sees(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Whether the query at one position sees the key at another."""
        seen = key <= query
        return seen if self.sliding_window is None else seen & (key > query - self.sliding_window)

    def finish(self, scores: jax.Array, seen: jax.Array) -> jax.Array:
        """Caps the scores, and lowers those that are not seen to where their exponentials vanish."""
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        return jnp.where(seen, scores, _LOWEST)

    def start(self, queries: jax.Array) -> "_Seen":
        """What queries [.., K, G, H] know that saw nothing but their sinks."""
        shape = queries.shape[:-1]
        if self.sinks is None:
            return _Seen(jnp.full(shape, _LOWEST), jnp.zeros(shape), jnp.zeros_like(queries))
        return _Seen(jnp.broadcast_to(self.sinks, shape), jnp.ones(shape), jnp.zeros_like(queries))


class _Seen(NamedTuple):
    """What queries know of the keys that they have seen.

    Attributes:
      high: [..] the largest score.
      total: [..] the sum of the weights exp(score - high).
      values: [.., H] the sum of the weighted values.
    """

    high: jax.Array
    total: jax.Array
    values: jax.Array

    def map(self, change: Callable[[jax.Array], jax.Array]) -> "_Seen":
        """Each part changed alike."""
        return _Seen(*map(change, self))

    def and_tile(self, scores: jax.Array, values: jax.Array) -> "_Seen":
        """With a tile more: its scores [K, .., C], and its values [K, C, H] weighted by them.

        A query that has seen nothing yet weighs keys that it does not see; all of that is multiplied by 0 at the first
        that it sees.
        """
        high = jnp.maximum(self.high, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - high[..., None])
        keep = jnp.exp(self.high - high)
        weighted = jnp.einsum("kabc,kch->kabh", weights, values)
        return _Seen(high, self.total * keep + jnp.sum(weights, axis=-1), self.values * keep[..., None] + weighted)


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
    kv_heads = kv_pages.shape[3] // 2
    pool = _Pool(kv_pages, page_indices, layer[0])
    queries = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    queries = queries * (sm_scale if k_scale is None else sm_scale * k_scale)
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, -1)
    scores = _Scores(sinks, sliding_window, soft_cap)
    q_lens = work.query_lens(cu_q_lens, num_seqs)
    if decode_only and len(kv_lens) == tokens == 1:
        out = _decode_one(queries, pool, scores, jnp.where(q_lens == 1, kv_lens, 0))
    else:
        out = _decode(queries, pool, scores, kv_lens, cu_q_lens, q_lens, share=decode_only)
    if not decode_only:
        out = _prefill(out, queries, pool, scores, kv_lens, cu_q_lens, q_lens)
    if v_scale is not None:
        out = out * v_scale
    return out.reshape(tokens, heads, head_dim).astype(q.dtype)


def _decode(
    queries: jax.Array,
    pool: _Pool,
    scores: _Scores,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    q_lens: jax.Array,
    *,
    share: bool,
) -> jax.Array:
    """[T, K, G, H] float32: the output of the rows with one query, and zero elsewhere.

    Args:
      share: look for keys that many rows have in common.
    """
    tokens, *_, head_dim = queries.shape
    rows = kv_lens.shape[0]
    width = min(max(rows, DECODE_ITEMS[0]), DECODE_ITEMS[1])
    if share and rows >= SHARED_FROM and scores.sliding_window is None:
        seen, shared = _shared(queries, pool, scores, kv_lens, cu_q_lens, q_lens)
    else:
        seen, shared = scores.start(_take(queries, cu_q_lens[:-1])), jnp.zeros_like(kv_lens)
    plan = work.decode_work(
        q_lens,
        kv_lens,
        shared,
        tile=DECODE_KEYS,
        chunk=pool.chunk(DECODE_KEYS),
        sliding_window=scores.sliding_window,
    )
    queries = _take(queries, _take(cu_q_lens, plan.rows))
    lens = _take(kv_lens, plan.rows)

    def window(state):
        index, high, sums = state
        items = index * width + jnp.arange(width)
        number, keys = plan.tiles(items, DECODE_KEYS)
        length = jnp.where(items < plan.total, _take(lens, number), 0)[:, None]
        positions = keys[:, None] + jnp.arange(DECODE_KEYS)
        live = positions < length
        k, v = pool.read(_take(plan.rows, number), positions, live)
        s = jnp.einsum("wkgh,wkhc->wkgc", _take(queries, number), k)
        s = scores.finish(s, (live & scores.sees(length - 1, positions))[:, None, None])

        # The window touches at most `width` rows, from the first item's on. Each one's maximum over its old keys and
        # all of its items comes first; then its items' sums add up as they are.
        first = number[0]
        owns = (first + jnp.arange(width)[:, None] == number) & (items < plan.total)
        old_high = lax.dynamic_slice_in_dim(high, first, width)
        item_high = jnp.where(owns[:, :, None, None], jnp.max(s, axis=-1), _LOWEST)
        new_high = jnp.maximum(old_high, jnp.max(item_high, axis=1))
        weights = jnp.exp(s - _take(new_high, number - first)[..., None])
        item_sums = jnp.concatenate(
            [jnp.einsum("wkgc,wkch->wkgh", weights, v), jnp.sum(weights, axis=-1, keepdims=True)], axis=-1
        )
        old_sums = lax.dynamic_slice_in_dim(sums, first, width) * jnp.exp(old_high - new_high)[..., None]
        new_sums = old_sums + _add_up(owns, item_sums)
        high = lax.dynamic_update_slice_in_dim(high, new_high, first, 0)
        return index + 1, high, lax.dynamic_update_slice_in_dim(sums, new_sums, first, 0)

    # By number, with room for the last window. Behind the sums of weighted values stand those of the weights.
    high, total, values = seen.map(lambda x: jnp.pad(_take(x, plan.rows), ((0, width), *((0, 0),) * (x.ndim - 1))))
    sums = jnp.concatenate([values, total[..., None]], axis=-1)
    _, _, sums = lax.while_loop(lambda state: state[0] * width < plan.total, window, (jnp.int32(0), high, sums))
    out = sums[..., :head_dim] / jnp.maximum(sums[..., head_dim:], 1e-30)
    row = work.find(jnp.cumsum(q_lens), jnp.arange(tokens))
    mine = (_take(q_lens, row) == 1) & (_take(cu_q_lens, row) == jnp.arange(tokens))
    return jnp.where(mine[:, None, None, None], _take(out, _take(plan.ordinals, row)), 0)


def _decode_one(queries: jax.Array, pool: _Pool, scores: _Scores, kv_lens: jax.Array) -> jax.Array:
    """[1, K, G, H] float32: the output of a program's only query. No work list, and less than half of the operations.

    Args:
      kv_lens: i32[1] how many keys it has; the output is zero if it has none.
    """
    length = kv_lens[0]
    by_head = jnp.swapaxes(queries, 0, 1)

    def key_tile(state):
        start, seen = state
        positions = start + jnp.arange(DECODE_KEYS)
        live = positions < length
        k, v = pool.read(jnp.zeros(1, jnp.int32), positions[None], live[None])
        s = scores.finish(jnp.einsum("ksgh,khc->ksgc", by_head, k[0]), live & scores.sees(length - 1, positions))
        return start + DECODE_KEYS, seen.and_tile(s, v[0])

    first = work.first_key(length - 1, pool.chunk(DECODE_KEYS), scores.sliding_window)
    start = scores.start(queries).map(lambda x: jnp.swapaxes(x, 0, 1))
    _, seen = lax.while_loop(lambda state: state[0] < length, key_tile, (first, start))
    return jnp.swapaxes(seen.values / jnp.maximum(seen.total, 1e-30)[..., None], 0, 1)


def _shared(
    queries: jax.Array, pool: _Pool, scores: _Scores, kv_lens: jax.Array, cu_q_lens: jax.Array, q_lens: jax.Array
) -> tuple[_Seen, jax.Array]:
    """What the one query of each row knows after the keys that its row shares with many, and their number i32[S]."""
    plan = work.shared_work(
        q_lens,
        kv_lens,
        pool.page_indices,
        tile=SHARED_KEYS,
        page_size=pool.kv_pages.shape[2],
        least=max(SHARED_ROWS, len(kv_lens) // 4),
    )
    by_row = _take(queries, cu_q_lens[:-1])
    by_head = jnp.swapaxes(by_row, 0, 1)

    def key_tile(state):
        item, seen = state
        leader, first = plan.tile(item, SHARED_KEYS)
        positions = first + jnp.arange(SHARED_KEYS)
        k, v = pool.read(leader[None], positions[None], jnp.ones((1, SHARED_KEYS), bool))
        s = scores.finish(jnp.einsum("ksgh,khc->ksgc", by_head, k[0]), jnp.bool_(True))
        mine = (plan.leaders == leader)[None, :, None]  # no other row may know of these keys, NaN as they may be
        new = seen.and_tile(s, v[0])
        return item + 1, _Seen(
            jnp.where(mine, new.high, seen.high),
            jnp.where(mine, new.total, seen.total),
            jnp.where(mine[..., None], new.values, seen.values),
        )

    seen = scores.start(by_row).map(lambda x: jnp.swapaxes(x, 0, 1))
    _, seen = lax.while_loop(lambda state: state[0] < plan.total, key_tile, (jnp.int32(0), seen))
    return seen.map(lambda x: jnp.swapaxes(x, 0, 1)), plan.lens


def _prefill(
    out: jax.Array,
    queries: jax.Array,
    pool: _Pool,
    scores: _Scores,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    q_lens: jax.Array,
) -> jax.Array:
    """`out` [T, K, G, H] with the output of the rows with more than one query put in."""
    tokens = len(queries)
    tile = min(PREFILL_QUERIES, tokens)
    plan = work.prefill_work(q_lens, tile=tile)

    def query_tile(state):
        item, out = state
        row, offset = plan.tile(item, tile)
        first = kv_lens[row] - q_lens[row] + offset  # position of the item's first query
        length = jnp.minimum(kv_lens[row], first + tile)
        # The slice begins there, or earlier where the tokens would end before it does.
        wanted = cu_q_lens[row] + offset
        token = jnp.minimum(wanted, tokens - tile)
        tile_tokens = token + jnp.arange(tile)
        by_token = lax.dynamic_slice_in_dim(queries, token, tile)
        tile_queries = jnp.moveaxis(by_token, 0, 2)
        query_positions = (first + tile_tokens - wanted)[:, None]

        def key_tile(state, size):
            start, seen = state
            positions = start + jnp.arange(size)
            k, v = pool.read(row[None], positions[None], (positions < length)[None])
            s = jnp.einsum("kgth,khc->kgtc", tile_queries, k[0])
            s = scores.finish(s, scores.sees(query_positions, positions) & (positions < length))
            return start + size, seen.and_tile(s, v[0])

        large, small = PREFILL_KEYS
        keys = work.first_key(first, pool.chunk(large), scores.sliding_window)
        state = keys, scores.start(by_token).map(lambda x: jnp.moveaxis(x, 0, 2))
        state = lax.while_loop(lambda s: s[0] + large <= length, functools.partial(key_tile, size=large), state)
        _, seen = lax.while_loop(lambda s: s[0] < length, functools.partial(key_tile, size=small), state)
        tile_out = (seen.values / jnp.maximum(seen.total, 1e-30)[..., None]).transpose(2, 0, 1, 3)
        mine = ((tile_tokens >= wanted) & (tile_tokens < cu_q_lens[row] + q_lens[row]))[:, None, None, None]
        old = lax.dynamic_slice_in_dim(out, token, tile)
        return item + 1, lax.dynamic_update_slice_in_dim(out, jnp.where(mine, tile_out, old), token, 0)

    _, out = lax.while_loop(lambda state: state[0] < plan.total, query_tile, (jnp.int32(0), out))
    return out


def _add_up(owns: jax.Array, parts: jax.Array) -> jax.Array:
    """Per row r the sum of `parts` [W, K, G, X] over the items i with owns[r, i], bool[R, W].

    A product with a 0-1 matrix. An item that is not finite would reach all rows through it (0 * NaN is NaN): it stands
    aside, and makes its own row NaN.
    """
    flat = parts.reshape(parts.shape[0], -1)
    finite = jnp.isfinite(jnp.sum(flat, axis=-1))
    sums = jnp.dot(owns.astype(jnp.float32), jnp.where(finite[:, None], flat, 0))
    broken = jnp.any(owns & ~finite, axis=1)
    return jnp.where(broken[:, None], jnp.nan, sums).reshape(owns.shape[0], *parts.shape[1:])


def _take(array: jax.Array, *index: jax.Array) -> jax.Array:
    """`array[index]`, where an index that is out of bounds, as padding may hold, is clamped (as XLA's gather does)."""
    return array.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _zero_unless(keep: jax.Array, stored: jax.Array) -> jax.Array:
    """Zero where `keep` is false. By bits where there is an integer dtype at hand: XLA:CPU vectorizes that better."""
    if stored.dtype == jnp.uint16:
        return stored & jnp.where(keep, jnp.uint16(0xFFFF), jnp.uint16(0))
    return jnp.where(keep, stored, jnp.zeros((), stored.dtype))
