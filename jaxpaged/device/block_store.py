"""Whole blocks on the move: copies within the page pool, and to host memory and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxpaged.core.step import Step
from jaxpaged.device.kv_cache import pages_format
from jaxpaged.device.program_store import ProgramStore

COPY_WIDTH = 8  # block copies of one call
SWAP_WIDTHS = (8, 1)  # blocks of one call; down to 1, so that host memory holds no padding


class BlockStore:
    """Moves blocks as a step says. It owns the copies in host memory; the pool is the caller's, and donated.

    Calls return at once: copies run on the device in the order of the calls, and host memory fills as they run.

    Args:
      pool: shape and dtype of the page pool.
    """

    def __init__(self, pool: jax.ShapeDtypeStruct, store: ProgramStore):
        self._pool, self._store = pool, store
        self._programs: dict[tuple[str, int], jax.stages.Compiled] = {}
        self._host: dict[int, list[jax.Array]] = {}  # by key: pieces of as many blocks as SWAP_WIDTHS say
        self._host_memory, self._device_memory = _memories()

    @property
    def num_programs(self) -> int:
        """Compiled programs."""
        return len(self._programs)

    @property
    def num_swapped_blocks(self) -> int:
        """Blocks in host memory."""
        return sum(piece.shape[1] for pieces in self._host.values() for piece in pieces)

    def programs(self, *, swaps: bool) -> list[Callable[[], Any]]:
        """What compiles each program that steps will need; `swaps`: also those that move blocks to the host."""
        needed = [("copy", COPY_WIDTH)]
        if swaps:
            needed += [(name, width) for name in ("gather", "scatter") for width in SWAP_WIDTHS]
        return [lambda name=name, width=width: self._program(name, width) for name, width in needed]

    def apply(self, kv_pages: jax.Array, step: Step) -> jax.Array:
        """The pool after a step's swaps and copies, in the order that `Step` states."""
        self.drop(step.dropped)
        for swap in step.swap_out:
            self._host[swap.key] = self._swap_out(kv_pages, swap.block_ids)
        for swap in step.swap_in:
            kv_pages = self._swap_in(kv_pages, swap.block_ids, self._host.pop(swap.key))
        return self._copy(kv_pages, step.copies) if step.copies else kv_pages

    def drop(self, keys: Sequence[int]) -> None:
        """Frees copies in host memory."""
        for key in keys:
            self._host.pop(key, None)  # a launch that failed may have left nothing

    def _copy(self, kv_pages: jax.Array, copies: Sequence[tuple[int, int]]) -> jax.Array:
        for i in range(0, len(copies), COPY_WIDTH):
            some = copies[i : i + COPY_WIDTH]
            pairs = np.zeros((COPY_WIDTH, 2), np.int32)  # padding copies scratch to itself
            pairs[: len(some)] = some
            kv_pages = self._program("copy", COPY_WIDTH)(kv_pages, pairs)
        return kv_pages

    def _swap_out(self, kv_pages: jax.Array, block_ids: Sequence[int]) -> list[jax.Array]:
        pieces = []
        for start, width in _pieces(len(block_ids)):
            ids = np.array(block_ids[start : start + width], np.int32)
            blocks = self._program("gather", width)(kv_pages, ids)
            pieces.append(jax.device_put(blocks, self._host_memory) if self._host_memory else blocks)
        return pieces

    def _swap_in(self, kv_pages: jax.Array, block_ids: Sequence[int], pieces: Sequence[jax.Array]) -> jax.Array:
        assert sum(piece.shape[1] for piece in pieces) == len(block_ids), "a swap brings back all that it took"
        for (start, width), piece in zip(_pieces(len(block_ids)), pieces, strict=True):
            ids = np.array(block_ids[start : start + width], np.int32)
            blocks = jax.device_put(piece, self._device_memory) if self._host_memory else piece
            kv_pages = self._program("scatter", width)(kv_pages, ids, blocks)
        return kv_pages

    def _program(self, name: str, width: int) -> jax.stages.Compiled:
        key = (name, width)
        if key not in self._programs:
            _, arguments = program(name, self._pool, width)
            self._programs[key] = self._store.program(
                f"{name}_blocks", arguments, lambda: lower(name, self._pool, width)
            )
        return self._programs[key]


def lower(name: str, pool: jax.ShapeDtypeStruct, width: int) -> jax.stages.Lowered:
    """The program "copy", "gather" or "scatter" for `width` blocks, ready to be compiled for this device."""
    function, arguments = program(name, pool, width)
    order = pages_format()
    orders: dict[str, Any] = {}
    if order is not None:
        orders = {"in_shardings": (order, *(None for _ in arguments[1:]))}
        if name != "gather":
            orders["out_shardings"] = order
    return jax.jit(function, donate_argnums=() if name == "gather" else 0, **orders).lower(*arguments)


def program(name: str, pool: jax.ShapeDtypeStruct, width: int) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """The function of a program, and the shapes and dtypes of its arguments, the pool first."""
    ids = jax.ShapeDtypeStruct((width,), jnp.int32)
    blocks = jax.ShapeDtypeStruct((pool.shape[0], width, *pool.shape[2:]), pool.dtype)
    pairs = jax.ShapeDtypeStruct((width, 2), jnp.int32)
    return {
        "copy": (copy_blocks, (pool, pairs)),
        "gather": (gather_blocks, (pool, ids)),
        "scatter": (scatter_blocks, (pool, ids, blocks)),
    }[name]


def copy_blocks(kv_pages: jax.Array, pairs: jax.Array) -> jax.Array:
    """The pool after copying block `pairs[i, 0]` to `pairs[i, 1]`; all are read before any is written."""
    blocks = gather_blocks(kv_pages, pairs[:, 0])
    # Without the barrier XLA may fuse reading and writing, and then has to copy the pool to keep them apart.
    return scatter_blocks(kv_pages, pairs[:, 1], jax.lax.optimization_barrier(blocks))


def gather_blocks(kv_pages: jax.Array, ids: jax.Array) -> jax.Array:
    """Blocks `ids` of all layers, [L, W, page_size, 2K, H]."""
    return kv_pages.at[:, ids].get(mode="promise_in_bounds", wrap_negative_indices=False)


def scatter_blocks(kv_pages: jax.Array, ids: jax.Array, blocks: jax.Array) -> jax.Array:
    """The pool with `blocks` as blocks `ids`."""
    if len(ids) == 1:  # XLA:CPU may rewrite a scatter of one row into something that copies the pool: write it twice
        ids, blocks = jnp.concatenate([ids, ids]), jnp.concatenate([blocks, blocks], axis=1)
    return kv_pages.at[:, ids].set(blocks, mode="promise_in_bounds", wrap_negative_indices=False)


def _pieces(num_blocks: int) -> list[tuple[int, int]]:
    """Where to cut so many blocks: (start, width) of pieces, the widest first."""
    pieces, start = [], 0
    for width in SWAP_WIDTHS:
        while num_blocks - start >= width:
            pieces.append((start, width))
            start += width
    return pieces


def _memories() -> tuple[SingleDeviceSharding | None, SingleDeviceSharding]:
    """Host memory that the device copies to by itself (None: it has none), and its own memory."""
    device = jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host") if "pinned_host" in kinds else None
    return pinned, SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
