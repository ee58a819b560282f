"""The pool's dtypes, and that no program copies a pool."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention, write_kv
from pallas_kernels.pool import storage_dtype, to_float32, to_storage

LAYERS, PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, ROWS = 4, 512, 16, 2, 64, 8
POOL_BYTES = LAYERS * PAGES * PAGE_SIZE * 2 * KV_HEADS * HEAD_DIM * 2


def test_only_bfloat16_on_cpu_is_kept_as_bits():
    assert storage_dtype("bfloat16", "cpu") == jnp.uint16
    assert storage_dtype("bfloat16") == jnp.uint16 if jax.default_backend() == "cpu" else jnp.bfloat16
    for dtype, platform in (("bfloat16", "gpu"), ("bfloat16", "tpu"), ("float32", "cpu"), ("float16", "cpu")):
        assert storage_dtype(dtype, platform) == dtype


def test_bits_of_bfloat16_are_kept():
    x = jnp.array([0.0, -1.5, 3.14159, 1e38, -1e-40, jnp.inf, jnp.nan])
    stored = to_storage(x, None, jnp.uint16)
    assert stored.dtype == jnp.uint16
    np.testing.assert_array_equal(to_float32(stored), x.astype(jnp.bfloat16).astype(jnp.float32))


def layers_program(kv_pages, q, kv_lens, page_indices, cu_q_lens, slot_mapping):
    """Write and attend, layer after layer, as a model's step does."""
    num_seqs = jnp.array([ROWS], jnp.int32)
    angles = jnp.ones((q.shape[0], HEAD_DIM // 2), jnp.float32)
    for layer in range(LAYERS):
        index = jnp.array([layer], jnp.int32)
        qkv = q.reshape(len(q), KV_HEADS, -1, HEAD_DIM)
        qkv = jnp.concatenate([qkv, qkv[:, :, :2]], axis=2)
        rotated, kv_pages = write_kv(qkv, angles, angles, kv_pages, slot_mapping, index)
        q = q + ragged_paged_attention(
            rotated, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, index, sm_scale=0.125
        )
    return kv_pages, q


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads XLA:CPU's programs")
@pytest.mark.parametrize(("dtype", "tokens"), [("float32", ROWS), ("bfloat16", ROWS), ("bfloat16", 4 * ROWS)])
def test_no_program_copies_the_pool(dtype, tokens):
    """Neither the writes nor the loops that read: no instruction but in-place ones makes a pool."""
    pool_dtype = storage_dtype(dtype)
    shapes = {
        "kv_pages": ((LAYERS, PAGES, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM), pool_dtype),
        "q": ((tokens, 2 * KV_HEADS, HEAD_DIM), dtype),
        "kv_lens": ((ROWS,), jnp.int32),
        "page_indices": ((ROWS, 8), jnp.int32),
        "cu_q_lens": ((ROWS + 1,), jnp.int32),
        "slot_mapping": ((tokens,), jnp.int32),
    }
    program = jax.jit(layers_program, donate_argnums=0)
    compiled = program.lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes.values())).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    assert memory.alias_size_in_bytes >= POOL_BYTES * pool_dtype.itemsize // 2, "the pool is donated"
    assert memory.temp_size_in_bytes < POOL_BYTES // 2

    slots, elements = LAYERS * PAGES * PAGE_SIZE, POOL_BYTES // 2
    makers = set()
    for line in text.splitlines():
        made = re.match(r"\s*(?:ROOT )?%[\w.\-]+ = \w+\[([\d,]+)\]\S* ([\w\-]+)\(", line)
        if made and np.prod([int(size) for size in made[1].split(",")]) == elements:
            makers.add(made[2] if made[2] != "fusion" or "scatter" not in line else "scatter")
    assert makers <= {"parameter", "bitcast", "get-tuple-element", "scatter"}, f"of {slots} slots"
