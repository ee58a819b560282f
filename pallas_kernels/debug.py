"""Checks of what the arrays of a call hold, which no shape or dtype can tell: for `debug=True`.

They cost a copy to the host and a wait per call. Inside `jax.jit` an error appears when the program's results are
waited for, as a runtime error of JAX that contains the message.
"""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax.core import Tracer


def check_attention(
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    layer: jax.Array,
    *,
    tokens: int,
    pool: tuple[int, ...],
    decode_only: bool,
) -> None:
    """Raises ValueError, with the value, unless the arguments describe a batch; see `ragged_paged_attention`.

    Args:
      tokens: T.
      pool: shape of kv_pages.
    """
    check = partial(_check_attention, tokens=tokens, pool=pool, decode_only=decode_only)
    _run(check, kv_lens, page_indices, cu_q_lens, num_seqs, layer)


def check_write(slot_mapping: jax.Array, layer: jax.Array, *, pool: tuple[int, ...]) -> None:
    """Raises ValueError, with the value, unless tokens have slots of their own; see `write_kv`.

    Args:
      pool: shape of kv_pages.
    """
    _run(partial(_check_write, pool=pool), slot_mapping, layer)


def _run(check: Callable[..., None], *arrays: jax.Array) -> None:
    if any(isinstance(array, Tracer) for array in arrays):
        jax.debug.callback(lambda *values: check(*map(np.asarray, values)), *arrays)
    else:
        check(*map(np.asarray, arrays))


def _check_attention(
    kv_lens: np.ndarray,
    page_indices: np.ndarray,
    cu_q_lens: np.ndarray,
    num_seqs: np.ndarray,
    layer: np.ndarray,
    *,
    tokens: int,
    pool: tuple[int, ...],
    decode_only: bool,
) -> None:
    layers, pages, page_size = pool[:3]
    _check_range("layer", layer, 0, layers)
    _check_range("num_seqs", num_seqs, 0, len(kv_lens) + 1)
    live = int(num_seqs[0])
    if cu_q_lens[0] != 0:
        raise ValueError(f"cu_q_lens[0] must be 0, got {cu_q_lens[0]}")
    q_lens = np.diff(cu_q_lens[: live + 1])
    _check_range("cu_q_lens[1:] - cu_q_lens[:-1]", q_lens, 0, 2 if decode_only else tokens + 1)
    _check_range("cu_q_lens", cu_q_lens[: live + 1], 0, tokens + 1)
    for row in np.flatnonzero(q_lens):
        length = kv_lens[row]
        if not q_lens[row] <= length <= page_indices.shape[1] * page_size:
            raise ValueError(
                f"kv_lens[{row}] must be at least the row's {q_lens[row]} queries and at most the "
                f"{page_indices.shape[1] * page_size} tokens of its page table, got {length}"
            )
        _check_range(f"page_indices[{row}]", page_indices[row, : -(-length // page_size)], 0, pages)


def _check_write(slot_mapping: np.ndarray, layer: np.ndarray, *, pool: tuple[int, ...]) -> None:
    layers, pages, page_size = pool[:3]
    _check_range("layer", layer, 0, layers)
    _check_range("slot_mapping", slot_mapping, 0, pages * page_size)
    slots, counts = np.unique(slot_mapping, return_counts=True)
    shared = slots[(counts > 1) & (slots >= page_size)]
    if len(shared):
        raise ValueError(f"slot_mapping has slot {shared[0]} more than once, and it is not of page 0")


def _check_range(name: str, values: np.ndarray, low: int, end: int) -> None:
    wrong = np.flatnonzero((values < low) | (values >= end))
    if len(wrong):
        raise ValueError(f"{name}[{wrong[0]}] must be in [{low}, {end}), got {values[wrong[0]]}")
