"""The public operation: checks its arguments and calls one of the implementations."""

from numbers import Integral, Real
from typing import Any

import jax

from pallas_kernels.checks import (
    check_arrays,
    check_float,
    check_index,
    check_packed,
    check_pool,
    check_scale,
    check_shape,
    pick_implementation,
)
from pallas_kernels.debug import check_attention
from pallas_kernels.ragged_paged_attention import gpu, reference, tpu, xla

_AVAILABLE = {
    "reference": reference.ragged_paged_attention,
    "xla": xla.ragged_paged_attention,
    "gpu": gpu.ragged_paged_attention,
    "tpu": tpu.ragged_paged_attention,
}

_LARGEST = 3.4e38  # of float32


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    layer: jax.Array,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    decode_only: bool | None = None,
    implementation: str | None = None,
    interpret: bool = False,
    debug: bool = False,
) -> jax.Array:
    """Causal attention of packed queries, each row over its own pages of the pool.

    Row s owns the queries `q[cu_q_lens[s]:cu_q_lens[s + 1]]`; they stand at the sequence positions
    `kv_lens[s] - q_len .. kv_lens[s] - 1`, and each sees the keys up to its own position. Token i of row s lies in the
    slot `i % page_size` of the page `page_indices[s, i // page_size]`. Slots that no live row covers may hold anything,
    NaN included, and so may `q` beyond the last live token and all entries of rows beyond `num_seqs`.

    Args:
      q: [T, N, H] packed queries (after rope), float32, bfloat16 or float16.
      kv_pages: [L, P, page_size, 2K, H] pool; head 2k is the key of KV head k, head 2k+1 its value; N is a multiple
        of K. One of q's dtypes, uint16 (the bits of bfloat16, see `pallas_kernels.pool`), or float8_e4m3fn, float8_e5m2
        and int8 with `k_scale` and `v_scale`.
      kv_lens: i32[S] tokens in the cache per row, those of this step included.
      page_indices: i32[S, max_pages]; entries beyond a row's length are ignored.
      cu_q_lens: i32[S + 1]; entries beyond num_seqs are ignored.
      num_seqs: i32[1] number of live rows; the others are padding.
      layer: i32[1] index into L.
      sm_scale: multiplies the scores.
      sliding_window: the query at p sees the keys p - sliding_window + 1 .. p only.
      soft_cap: scores s become `soft_cap * tanh(s / soft_cap)`.
      sinks: [N] one more logit per head, that takes part in the softmax and has no value.
      k_scale, v_scale: stored key * k_scale = key, and likewise for values.
      decode_only: static promise that no row has more than one query; the program is then smaller. None means T == S,
        the shape of a decode step: pass False for a program of that shape whose rows may have more.
      implementation: "reference", "xla", "gpu", "gpu_hopper", "tpu", or None for the best one here.
      interpret: runs a Pallas implementation on any platform, slowly: for tests.
      debug: also checks what the integer arrays hold, see `pallas_kernels.debug`.

    Returns:
      [T, N, H] in q's dtype; zero for tokens that no live row owns.

    Raises:
      ValueError: a shape, dtype or option is wrong, or with `debug` a number in an array; the message shows it.
      NotImplementedError: the implementation does not exist, or lacks this case.
    """
    check_arrays(q=q, kv_pages=kv_pages, kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens)
    check_arrays(num_seqs=num_seqs, layer=layer, sinks=q if sinks is None else sinks)
    tokens, heads, head_dim = check_packed("q", q)
    *_, kv_heads, pool_head_dim = check_pool(kv_pages)
    if head_dim != pool_head_dim:
        raise ValueError(f"q and kv_pages must have the same head_dim, got {head_dim} and {pool_head_dim}")
    if heads % kv_heads:
        raise ValueError(f"the query heads must be a multiple of the KV heads, got {heads} and {kv_heads}")
    if kv_lens.ndim != 1 or page_indices.ndim != 2 or 0 in page_indices.shape:
        raise ValueError(
            "kv_lens must be [rows] and page_indices [rows, max_pages] with no empty axis, "
            f"got shapes {tuple(kv_lens.shape)} and {tuple(page_indices.shape)}"
        )
    rows = kv_lens.shape[0]
    check_index("kv_lens", kv_lens, (rows,))
    check_index("page_indices", page_indices, (rows, page_indices.shape[1]))
    check_index("cu_q_lens", cu_q_lens, (rows + 1,))
    check_index("num_seqs", num_seqs, (1,))
    check_index("layer", layer, (1,))
    _check_options(sm_scale, sliding_window, soft_cap, decode_only)
    if sinks is not None:
        check_shape("sinks", sinks, (heads,))
        check_float("sinks", sinks)
    decode_only = tokens == rows if decode_only is None else decode_only
    if debug:
        check_attention(
            kv_lens,
            page_indices,
            cu_q_lens,
            num_seqs,
            layer,
            tokens=tokens,
            pool=kv_pages.shape,
            decode_only=decode_only,
        )
    k_scale, v_scale = check_scale("k_scale", k_scale), check_scale("v_scale", v_scale)
    attend = pick_implementation("ragged_paged_attention", implementation, _AVAILABLE, interpret=interpret)
    return attend(
        q,
        kv_pages,
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        layer,
        sinks,
        k_scale,
        v_scale,
        sm_scale=float(sm_scale),
        sliding_window=None if sliding_window is None else int(sliding_window),
        soft_cap=None if soft_cap is None else float(soft_cap),
        decode_only=decode_only,
    )


def _check_options(sm_scale: Any, sliding_window: Any, soft_cap: Any, decode_only: Any) -> None:
    if not _is_number(sm_scale) or not -_LARGEST <= sm_scale <= _LARGEST:
        raise ValueError(f"sm_scale must be a finite number, got {sm_scale!r}")
    if sliding_window is not None and (
        not isinstance(sliding_window, Integral)
        or isinstance(sliding_window, bool)
        or not 0 < int(sliding_window) < 2**31
    ):
        raise ValueError(f"sliding_window must be a positive 32-bit integer or None, got {sliding_window!r}")
    if soft_cap is not None and not (_is_number(soft_cap) and 0 < soft_cap <= _LARGEST):
        raise ValueError(f"soft_cap must be a positive number or None, got {soft_cap!r}")
    if decode_only is not None and not isinstance(decode_only, bool):
        raise ValueError(f"decode_only must be True, False or None, got {decode_only!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
