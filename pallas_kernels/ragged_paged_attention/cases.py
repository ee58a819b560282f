"""Named batches for ragged_paged_attention, shared by the tests of every implementation and by the benchmarks."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """One batch: what `make_inputs` draws arrays for.

    Attributes:
      rows: (q_len, kv_len) of each live row; the rows with one query first.
      heads, kv_heads, head_dim: N, K, H.
      page_size: tokens per page.
      dtype, pool_dtype: of q and of the pool (None: the same).
      sliding_window, soft_cap: as in the operation.
      sinks: whether there is a sink logit per head.
      k_scale, v_scale: as in the operation.
      padding_rows, padding_tokens: rows and tokens that no one owns.
      layers, layer: depth of the pool and the layer that is read.
      spare_pages: pages of the pool that no row uses.
      decode_only: as in the operation.
    """

    rows: tuple[tuple[int, int], ...]
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
    padding_rows: int = 0
    padding_tokens: int = 0
    layers: int = 2
    layer: int = 1
    spare_pages: int = 3
    decode_only: bool | None = None


@dataclass(frozen=True)
class Inputs:
    """Arrays and options of one call: `op(*arrays, **options)`."""

    arrays: tuple[Any, ...]
    options: dict[str, Any]


def make_inputs(case: Case, seed: int, *, poison: bool = True, max_pages: int | None = None) -> Inputs:
    """Random inputs for a case.

    Pages are dealt in random order. With `poison`, every slot that no live row covers is NaN (or the largest value of
    a dtype without NaN), and so are the queries that no row owns; what describes padding rows is arbitrary.

    Args:
      case: the batch.
      seed: of the numpy generator.
      poison: False leaves ordinary numbers there.
      max_pages: width of the page table; None means what the longest row needs and two more.
    """
    rng = np.random.default_rng(seed)
    live = len(case.rows)
    rows = live + case.padding_rows
    q_lens = np.array([q_len for q_len, _ in case.rows], np.int32)
    lens = np.array([kv_len for _, kv_len in case.rows], np.int32)
    counts = -(-lens // case.page_size)
    tokens = int(q_lens.sum()) + case.padding_tokens

    cu_q_lens = np.full(rows + 1, q_lens.sum(), np.int32)
    cu_q_lens[: live + 1] = np.concatenate([[0], np.cumsum(q_lens)])
    kv_lens = np.zeros(rows, np.int32)
    kv_lens[:live] = lens
    num_pages = 1 + int(counts.sum()) + case.spare_pages
    width = max_pages or int(counts.max(initial=0)) + 2
    page_indices = rng.integers(0, num_pages, (rows, width)).astype(np.int32)
    deal = rng.permutation(np.arange(1, num_pages))
    pool_dtype = jnp.dtype(case.pool_dtype or case.dtype)
    pool = np.full(
        (case.layers, num_pages, case.page_size, 2 * case.kv_heads, case.head_dim), _poison(pool_dtype, poison)
    )
    if poison:
        cu_q_lens[live + 1 :] = rng.integers(0, 100, case.padding_rows)
        kv_lens[live:] = rng.integers(0, 100, case.padding_rows)
    for row in range(live):
        mine, deal = deal[: counts[row]], deal[counts[row] :]
        page_indices[row, : counts[row]] = mine
        slots = (mine[:, None] * case.page_size + np.arange(case.page_size)).reshape(-1)[: lens[row]]
        flat = pool[case.layer].reshape(-1, *pool.shape[3:])
        flat[slots] = _draw(rng, (len(slots), *pool.shape[3:]), pool_dtype)
    q = rng.standard_normal((tokens, case.heads, case.head_dim), np.float32)
    q[q_lens.sum() :] = np.nan if poison else 0

    arrays = (
        jnp.asarray(q).astype(case.dtype),
        jnp.asarray(pool).astype(pool_dtype),
        jnp.asarray(kv_lens),
        jnp.asarray(page_indices),
        jnp.asarray(cu_q_lens),
        jnp.array([live], jnp.int32),
        jnp.array([case.layer], jnp.int32),
    )
    options = {"sm_scale": case.head_dim**-0.5}
    for name in ("sliding_window", "soft_cap", "k_scale", "v_scale", "decode_only"):
        if getattr(case, name) is not None:
            options[name] = getattr(case, name)
    if case.sinks:
        options["sinks"] = jnp.asarray(rng.standard_normal(case.heads, np.float32))
    return Inputs(arrays, options)


def _draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if dtype == jnp.int8:
        return rng.integers(-127, 128, shape).astype(np.float32)
    return rng.standard_normal(shape, np.float32)


def _poison(dtype: Any, poison: bool) -> np.float32:
    if not poison:
        return np.float32(0)
    return np.float32(127 if dtype == jnp.int8 else np.nan)


_DECODES = Case(rows=((1, 1), (1, 15), (1, 16), (1, 17), (1, 300)))
_MIXED = Case(rows=((1, 40), (1, 129), (3, 3), (70, 200), (17, 17)), padding_rows=3, padding_tokens=9)

CASES: dict[str, Case] = {
    # The shapes of a step.
    "decode": _DECODES,
    "decode_padded": replace(_DECODES, padding_rows=3, padding_tokens=3),
    "decode_many": replace(_DECODES, rows=tuple((1, 1 + 7 * i) for i in range(40))),
    "decode_one": replace(_DECODES, rows=((1, 257),)),
    "decode_empty_rows": replace(_DECODES, rows=((1, 5), (0, 0), (1, 200), (0, 30), (1, 9)), padding_tokens=2),
    "nothing": replace(_DECODES, rows=(), padding_rows=2, padding_tokens=2),
    "prefill": replace(_MIXED, rows=((130, 130),)),
    "prefill_chunk": replace(_MIXED, rows=((40, 300), (5, 150))),
    "mixed": _MIXED,
    "mixed_empty_rows": replace(_MIXED, rows=((1, 40), (0, 7), (66, 66), (0, 0), (2, 130))),
    "mixed_as_many_tokens_as_rows": replace(
        _MIXED, rows=((1, 40), (2, 20), (2, 2)), padding_rows=2, padding_tokens=0, decode_only=False
    ),
    # Page sizes.
    **{
        f"page_{size}": replace(
            _MIXED,
            page_size=size,
            rows=((1, 1), (1, size - 1), (1, size), (1, size + 1), (1, 2 * size + 150), (size + 1, 2 * size + 1)),
        )
        for size in (8, 32, 64, 128, 256)
    },
    # Heads.
    "mha": replace(_MIXED, heads=3, kv_heads=3),
    "mqa": replace(_MIXED, heads=5, kv_heads=1),
    "gqa_odd": replace(_MIXED, heads=9, kv_heads=3),
    **{f"head_dim_{size}": replace(_MIXED, head_dim=size) for size in (80, 96, 128, 192, 256)},
    # Scores.
    "window": replace(_MIXED, sliding_window=20),
    "window_one": replace(_MIXED, sliding_window=1),
    "window_decode": replace(_DECODES, sliding_window=130),
    "soft_cap": replace(_MIXED, soft_cap=2.0),
    "sinks": replace(_MIXED, sinks=True),
    "everything": replace(
        _MIXED, sliding_window=70, soft_cap=5.0, sinks=True, k_scale=0.5, v_scale=2.0, dtype="bfloat16"
    ),
    # Dtypes.
    "bfloat16": replace(_MIXED, dtype="bfloat16"),
    "float16": replace(_MIXED, dtype="float16"),
    "float32_pool": replace(_MIXED, dtype="bfloat16", pool_dtype="float32"),
    "float8_pool": replace(_MIXED, dtype="bfloat16", pool_dtype="float8_e4m3fn", k_scale=0.7, v_scale=1.5),
    "int8_pool": replace(_MIXED, dtype="bfloat16", pool_dtype="int8", k_scale=0.01, v_scale=0.02),
}
"""Small batches that between them reach every feature; all implementations must agree with the reference on them."""

BENCHMARKS: dict[str, Case] = {
    f"{rows}x{context}": Case(
        rows=((1, context),) * rows,
        heads=9,
        kv_heads=3,
        dtype="bfloat16",
        layers=4,
        spare_pages=max(0, 4096 - rows * context // 16),
    )
    for rows, context in ((32, 256), (8, 256), (1, 256), (1, 1024), (1, 4096))
}
"""Shapes of the demo model (9 query heads, 3 KV heads, head dim 64) that the benchmarks time."""
