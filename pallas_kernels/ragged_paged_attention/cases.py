"""Named batches for ragged_paged_attention, shared by the tests of every implementation and by the benchmarks."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.pool import to_storage


@dataclass(frozen=True)
class Case:
    """One batch: what `make_inputs` draws arrays for.

    Attributes:
      rows: (q_len, kv_len) of each live row; the rows with one query first.
      tokens, num_rows, max_pages, num_pages: T, S, width of the page table and P; None means what the rows need.
      heads, kv_heads, head_dim: N, K, H.
      page_size: tokens per page.
      dtype, pool_dtype: of q and of the pool (None: the same).
      sliding_window, soft_cap: as in the operation.
      sinks: whether there is a sink logit per head.
      k_scale, v_scale: as in the operation.
      layers, layer: depth of the pool and the layer that is read.
      decode_only: as in the operation.
      shared: (row, earlier row, tokens): as many of the row's first pages as these tokens fill are the earlier one's.
    """

    rows: tuple[tuple[int, int], ...]
    tokens: int | None = None
    num_rows: int | None = None
    max_pages: int | None = None
    num_pages: int | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    pool_dtype: str | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    k_scale: float | None = None
    v_scale: float | None = None
    layers: int = 2
    layer: int = 1
    decode_only: bool | None = None
    shared: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Inputs:
    """Arrays and options of one call: `op(*arrays, **options)`."""

    arrays: tuple[Any, ...]
    options: dict[str, Any]


def make_inputs(case: Case, seed: int, *, poison: bool = True) -> Inputs:
    """Random inputs for a case.

    Pages are dealt in random order. With `poison`, every slot that no live row covers is NaN (or the largest value of
    a dtype without NaN), and so are the queries that no row owns; what describes padding rows is arbitrary.

    Args:
      case: the batch.
      seed: of the numpy generator.
      poison: False leaves ordinary numbers there.
    """
    rng = np.random.default_rng(seed)
    kv_lens, page_indices, cu_q_lens, pages = _metadata(case, rng, poison)
    owned = sum(q_len for q_len, _ in case.rows)
    pool_dtype = jnp.dtype(case.pool_dtype or case.dtype)

    pool = np.full((case.layers, pages, case.page_size, 2 * case.kv_heads, case.head_dim), _filling(pool_dtype, poison))
    slots = pool[case.layer].reshape(-1, *pool.shape[3:])  # a view
    for row, (_, kv_len) in enumerate(case.rows):
        positions = np.arange(kv_len)
        mine = page_indices[row, positions // case.page_size] * case.page_size + positions % case.page_size
        slots[mine] = _draw(rng, (kv_len, *pool.shape[3:]), pool_dtype)
    q = rng.standard_normal((owned if case.tokens is None else case.tokens, case.heads, case.head_dim), np.float32)
    q[owned:] = np.nan if poison else 0

    arrays = (
        jnp.asarray(q).astype(case.dtype),
        to_storage(jnp.asarray(pool), None, pool_dtype),
        jnp.asarray(kv_lens),
        jnp.asarray(page_indices),
        jnp.asarray(cu_q_lens),
        jnp.array([len(case.rows)], jnp.int32),
        jnp.array([case.layer], jnp.int32),
    )
    options: dict[str, Any] = {"sm_scale": case.head_dim**-0.5}
    for name in ("sliding_window", "soft_cap", "k_scale", "v_scale", "decode_only"):
        if getattr(case, name) is not None:
            options[name] = getattr(case, name)
    if case.sinks:
        options["sinks"] = jnp.asarray(rng.standard_normal(case.heads, np.float32))
    return Inputs(arrays, options)


def _metadata(case: Case, rng: np.random.Generator, poison: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """kv_lens, page_indices and cu_q_lens of a case, and the number of pages of its pool."""
    live = len(case.rows)
    rows = live if case.num_rows is None else case.num_rows
    lens = np.array([kv_len for _, kv_len in case.rows], np.int32)
    counts = -(-lens // case.page_size)
    pages = 4 + int(counts.sum()) if case.num_pages is None else case.num_pages
    width = 2 + int(counts.max(initial=0)) if case.max_pages is None else case.max_pages
    assert live <= rows and counts.sum() < pages and counts.max(initial=0) <= width

    arbitrary = 100 if poison else 1
    ends = np.cumsum([0, *(q_len for q_len, _ in case.rows)], dtype=np.int32)
    cu_q_lens = np.concatenate([ends, rng.integers(0, arbitrary, rows - live, np.int32)])
    kv_lens = np.concatenate([lens, rng.integers(0, arbitrary, rows - live, np.int32)])
    page_indices = rng.integers(0, pages, (rows, width), np.int32)
    deal = np.split(rng.permutation(np.arange(1, pages, dtype=np.int32)), np.cumsum(counts))
    for row, mine in enumerate(deal[:-1]):
        page_indices[row, : len(mine)] = mine
    for row, earlier, tokens in case.shared:
        page_indices[row, : tokens // case.page_size] = page_indices[earlier, : tokens // case.page_size]
    return kv_lens, page_indices, cu_q_lens, pages


def _draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if dtype == jnp.int8:
        return rng.integers(-127, 128, shape).astype(np.float32)
    return rng.standard_normal(shape, np.float32)


def _filling(dtype: Any, poison: bool) -> np.float32:
    if not poison:
        return np.float32(0)
    return np.float32(127 if dtype == jnp.int8 else np.nan)


# Cases of the same shape and options share their compiled programs: new batches of these two cost little.
_STEP = Case(rows=(), tokens=288, num_rows=12, max_pages=40, num_pages=72, decode_only=False)
_DECODES = Case(rows=(), tokens=44, num_rows=44, max_pages=40, num_pages=512)
_MIXED = replace(_STEP, rows=((1, 40), (1, 129), (3, 3), (70, 200), (17, 17)))


def _pages(page_size: int, **options: Any) -> Case:
    """Contexts around the ends of a page and of tiles of keys."""
    return Case(
        rows=(
            (1, 1),
            (1, page_size - 1),
            (1, page_size),
            (1, page_size + 1),
            (1, 2 * page_size + 150),
            (9, page_size + 3),
        ),
        tokens=20,
        num_rows=8,
        page_size=page_size,
        **options,
    )


CASES: dict[str, Case] = {
    # Batches.
    "decode": replace(_DECODES, rows=((1, 1), (1, 15), (1, 16), (1, 17), (1, 300))),
    "decode_many": replace(_DECODES, rows=tuple((1, 1 + 7 * i) for i in range(44))),
    "decode_long_among_short": replace(_DECODES, rows=(*((1, 3),) * 30, (1, 640), *((1, 70),) * 10)),
    "decode_empty_rows": replace(_DECODES, rows=((1, 5), (0, 0), (1, 200), (0, 30), (1, 9))),
    "decode_nothing": _DECODES,
    "decode_more_tokens_than_rows": Case(
        rows=((1, 300), (0, 9), (1, 70)), num_rows=4, tokens=9, max_pages=40, decode_only=True
    ),
    "decode_fewer_tokens_than_rows": Case(
        rows=((1, 300), (0, 9), (0, 0), (1, 70)), num_rows=6, tokens=3, max_pages=40, decode_only=True, sinks=True
    ),
    "decode_few_and_long": Case(rows=((1, 1100), (1, 30), (1, 513)), num_rows=3, tokens=3, kv_heads=1, max_pages=70),
    "decode_few_and_long_with_window_and_sinks": Case(
        rows=((1, 1100), (1, 30), (1, 513)),
        num_rows=4,
        tokens=4,
        heads=6,
        head_dim=80,
        dtype="bfloat16",
        max_pages=70,
        sliding_window=600,
        soft_cap=20.0,
        sinks=True,
        v_scale=1.5,
    ),
    # Groups of 14, 12 and 4 rows, the first around rows that share nothing and with one that shares little; a context
    # that is another's beginning, and one that is all of another.
    "decode_shared": replace(
        _DECODES,
        rows=(*((1, 209 + 7 * i) for i in range(15)), (1, 208), (1, 208), *((1, 130 + i) for i in range(16))),
        shared=(
            *((i, 0, 208) for i in range(1, 17) if i not in (3, 9, 10)),
            (10, 0, 100),
            *((i, 17, 128) for i in range(18, 29)),
            *((i, 29, 80) for i in range(30, 33)),
        ),
    ),
    "decode_one": Case(rows=((1, 300),), decode_only=True),
    "decode_one_with_window_and_sinks": Case(
        rows=((1, 300),), page_size=128, sliding_window=130, soft_cap=20.0, sinks=True, pool_dtype="bfloat16"
    ),
    "decode_shared_with_window": replace(
        _DECODES,
        rows=tuple((1, 150 + i) for i in range(14)),
        shared=tuple((i, 0, 144) for i in range(1, 14)),
        sliding_window=130,
    ),
    "mixed": _MIXED,
    "mixed_empty_rows": replace(_MIXED, rows=((1, 40), (0, 7), (66, 66), (0, 0), (2, 130))),
    "mixed_nothing": _STEP,
    "prefill": replace(_STEP, rows=((288, 288),)),
    "prefill_chunk": replace(_STEP, rows=((40, 300), (64, 500), (128, 128), (5, 150))),
    "prefill_long_chunk": replace(_STEP, rows=((70, 600), (2, 513))),
    "prefill_long_chunk_with_window_on_large_pages": Case(
        rows=((40, 1100),), heads=2, kv_heads=1, head_dim=64, page_size=256, sliding_window=600, decode_only=False
    ),
    "decodes_in_a_mixed_program": replace(_STEP, rows=tuple((1, 1 + 17 * i) for i in range(8))),
    "many_queries_in_a_decode_shape": Case(rows=((1, 40), (2, 20), (2, 2)), num_rows=5, decode_only=False),
    # Page sizes, heads and dtypes, several at a time.
    "page_8_mha_head_dim_80_float32_pool": _pages(
        8, heads=3, kv_heads=3, head_dim=80, dtype="bfloat16", pool_dtype="float32"
    ),
    "page_32_mqa_head_dim_96_bfloat16": _pages(32, heads=5, kv_heads=1, head_dim=96, dtype="bfloat16"),
    "page_64_gqa_odd_head_dim_192": _pages(64, heads=9, kv_heads=3, head_dim=192),
    "page_128_head_dim_128_float16": _pages(128, head_dim=128, dtype="float16"),
    "page_256_head_dim_256_bfloat16_bits": _pages(256, head_dim=256, dtype="bfloat16", pool_dtype="uint16"),
    "float8_pool": _pages(16, dtype="bfloat16", pool_dtype="float8_e4m3fn", k_scale=0.7, v_scale=1.5),
    "int8_pool": _pages(16, dtype="bfloat16", pool_dtype="int8", k_scale=0.01, v_scale=0.02),
    # Scores.
    "window": replace(_MIXED, sliding_window=20),
    "window_of_one": replace(_DECODES, rows=tuple((1, 1 + 13 * i) for i in range(30)), sliding_window=1),
    "window_of_several_tiles": replace(_DECODES, rows=tuple((1, 1 + 13 * i) for i in range(30)), sliding_window=130),
    "soft_cap_and_sinks": replace(_MIXED, soft_cap=2.0, sinks=True),
    "everything": replace(
        _MIXED,
        sliding_window=70,
        soft_cap=5.0,
        sinks=True,
        k_scale=0.5,
        v_scale=2.0,
        dtype="bfloat16",
        pool_dtype="uint16",
    ),
}
"""Small batches that between them reach every feature; all implementations must agree with the reference on them."""


def _demo(rows: tuple[tuple[int, int], ...], **options: Any) -> Case:
    return Case(rows=rows, heads=9, kv_heads=3, layers=4, max_pages=512, num_pages=4096, dtype="bfloat16", **options)


BENCHMARKS: dict[str, Case] = {
    "decode_32x256": _demo(((1, 256),) * 32),
    "decode_32_ragged": _demo(tuple((1, 16 + 15 * i) for i in range(32))),
    "decode_8x256": _demo(((1, 256),) * 8),
    "decode_1x256": _demo(((1, 256),)),
    "decode_1x1024": _demo(((1, 1024),)),
    "decode_1x4096": _demo(((1, 4096),)),
    "prefill_1x512": _demo(((512, 512),), num_rows=32),
    "prefill_4x128": _demo(((128, 128),) * 4, num_rows=32),
    "mixed_31x256_480": _demo((*((1, 256),) * 31, (481, 481)), num_rows=32),
}
"""Shapes of the demo model (9 query heads, 3 KV heads, head dim 64) that the benchmarks time."""
