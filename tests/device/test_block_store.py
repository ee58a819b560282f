"""Blocks that move: against NumPy, in every dtype a pool is stored in, and never by copying the pool."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.step import Step, Swap
from jaxpaged.device import block_store
from jaxpaged.device.block_store import BlockStore
from jaxpaged.device.compilation import compilations
from jaxpaged.device.program_store import ProgramStore
from pallas_kernels.deviceless import compile_for
from tests.compilers import needs_compilers

SHAPE = (2, 40, 4, 2, 8)  # layers, blocks, tokens, heads, dim
DTYPES = (jnp.float32, jnp.uint16, jnp.int8)  # bfloat16 is kept in uint16 on CPU
PROGRAMS = [(name, width) for name in ("copy", "gather", "scatter") for width in (1, 8)]


@pytest.fixture(scope="module", params=DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
def store(request) -> BlockStore:
    store = BlockStore(jax.ShapeDtypeStruct(SHAPE, request.param), ProgramStore())
    for compile_one in store.programs(swaps=True):
        compile_one()
    return store


def filled(dtype) -> np.ndarray:
    """Numbers that tell the blocks apart."""
    return (np.arange(math.prod(SHAPE)) * 37 % 199 - 99).astype(dtype).reshape(SHAPE)


def apply(store: BlockStore, pool: np.ndarray, step: Step) -> np.ndarray:
    return np.asarray(store.apply(jnp.array(pool), step))


@pytest.mark.parametrize("count", [1, 8, 11])
def test_copies_within_the_pool(store, count):
    """More than one call holds, too; blocks that are not named stay as they are."""
    pool = filled(store._pool.dtype)
    copies = [(i, 39 - i) for i in range(1, 1 + count)]
    expected = pool.copy()
    for source, target in copies:
        expected[:, target] = pool[:, source]
    np.testing.assert_array_equal(apply(store, pool, Step(copies=copies)), expected)


@pytest.mark.parametrize("count", [1, 7, 8, 19])
def test_a_swap_brings_back_what_it_took_to_other_blocks(store, count):
    pool = filled(store._pool.dtype)
    taken, given = list(range(1, 1 + count)), list(range(39, 39 - count, -1))
    out = store.apply(jnp.array(pool), Step(swap_out=[Swap(5, taken)]))
    assert store.num_swapped_blocks == count, "host memory holds no padding"
    overwritten = np.zeros_like(pool)
    expected = overwritten.copy()
    expected[:, given] = pool[:, taken]
    np.testing.assert_array_equal(np.asarray(out), pool)
    np.testing.assert_array_equal(apply(store, overwritten, Step(swap_in=[Swap(5, given)])), expected)
    assert store.num_swapped_blocks == 0


def test_a_step_swaps_out_then_in_then_copies(store):
    """A block may be taken, given to another request and copied in the same step."""
    pool = filled(store._pool.dtype)
    store.apply(jnp.array(pool), Step(swap_out=[Swap(1, [3, 4])]))
    step = Step(swap_out=[Swap(2, [7, 8])], swap_in=[Swap(1, [7, 8])], copies=[(7, 20)])
    expected = pool.copy()
    expected[:, [7, 8]] = pool[:, [3, 4]]
    expected[:, 20] = pool[:, 3]
    now = apply(store, pool, step)
    np.testing.assert_array_equal(now, expected)
    expected[:, [30, 31]] = pool[:, [7, 8]]
    np.testing.assert_array_equal(apply(store, now, Step(swap_in=[Swap(2, [30, 31])])), expected)


def test_dropped_copies_are_released(store):
    store.apply(jnp.array(filled(store._pool.dtype)), Step(swap_out=[Swap(8, [1, 2]), Swap(9, [3])]))
    store.apply(jnp.array(filled(store._pool.dtype)), Step(dropped=[8]))
    assert store.num_swapped_blocks == 1
    with pytest.raises(KeyError):
        store.apply(jnp.array(filled(store._pool.dtype)), Step(swap_in=[Swap(8, [1, 2])]))
    store.apply(jnp.array(filled(store._pool.dtype)), Step(dropped=[9, 9]))
    assert store.num_swapped_blocks == 0


def test_nothing_compiles_later_and_swapped_blocks_leave_the_device(store):
    before = compilations.count
    pool = store.apply(jnp.array(filled(store._pool.dtype)), Step(swap_out=[Swap(3, list(range(1, 14)))]))
    kinds = {piece.sharding.memory_kind for piece in store._host[3]}
    store.apply(pool, Step(swap_in=[Swap(3, list(range(21, 34)))], copies=[(1, 2)]))
    assert compilations.count == before
    if any(memory.kind == "pinned_host" for memory in jax.devices()[0].addressable_memories()):
        assert kinds == {"pinned_host"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, width", PROGRAMS)
def test_the_pool_is_not_copied(name, width, dtype):
    pool = jax.ShapeDtypeStruct((2, 4096, 4, 2, 8), dtype)
    compiled = block_store.lower(name, pool, width).compile()
    size = math.prod(pool.shape) * pool.dtype.itemsize
    shape = "[" + ",".join(map(str, pool.shape)) + "]"
    assert not [
        line for line in compiled.as_text().splitlines() if shape in line.split(" copy(")[0] and " copy(" in line
    ]
    analysis = compiled.memory_analysis()
    assert analysis.temp_size_in_bytes < size / 50
    assert name == "gather" or analysis.alias_size_in_bytes == size


@needs_compilers
@pytest.mark.parametrize("name, width", [("copy", 8), ("scatter", 8), ("scatter", 1)])
@pytest.mark.parametrize("device", ["h200", "v6e"])
def test_on_gpus_and_tpus(device, name, width):
    """TPUs hold the pool in row-major order, which a program has to keep."""
    pool = jax.ShapeDtypeStruct((4, 2049, 16, 16, 128), jnp.bfloat16)
    function, arguments = block_store.program(name, pool, width)
    program = compile_for(device, function, *arguments, donate_argnums=0, row_major=(0,) if device == "v6e" else ())
    size = math.prod(pool.shape) * 2
    assert program.aliased_bytes == size
    assert program.temporary_bytes < size / 50 and program.copied_bytes < size / 50
