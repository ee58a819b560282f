"""What is particular to the TPU kernels: their layouts, and copies that overlap; test_deviceless.py compiles them."""

import inspect
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import reference, tpu
from pallas_kernels.ragged_paged_attention.cases import Case, Inputs, make_inputs
from pallas_kernels.write_kv import reference as write_reference
from pallas_kernels.write_kv import tpu as write_tpu

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}

MIXED = Case(
    rows=((1, 300), (1, 5), (0, 0), (1, 256), (5, 140), (37, 290)),
    tokens=48,
    num_rows=8,
    max_pages=24,
    heads=8,
    kv_heads=4,
    head_dim=128,
    dtype="bfloat16",
)
CASES = {
    "three_kv_heads": replace(MIXED, heads=9, kv_heads=3),
    "one_kv_head_window": replace(MIXED, heads=5, kv_heads=1, sliding_window=100, sinks=True),
    "float8": replace(MIXED, pool_dtype="float8_e4m3fn", k_scale=0.5, v_scale=2.0),
    "float32_queries_bfloat16_pool": replace(MIXED, dtype="float32", pool_dtype="bfloat16", soft_cap=3.0),
}
RACES = replace(
    MIXED, rows=((1, 150), (0, 0), (1, 7), (5, 141)), tokens=8, num_rows=5, heads=2, kv_heads=1, dtype="float32"
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """128 keys and a few queries: several tiles of short contexts."""
    monkeypatch.setattr(tpu, "MAX_KEYS", 128)
    monkeypatch.setattr(tpu, "PREFILL_ROWS", 16)


def attend(implementation, inputs: Inputs, **options) -> np.ndarray:
    options = {"sliding_window": None, "soft_cap": None, "decode_only": False, **inputs.options, **options}
    others = [options.pop(name, None) for name in ("sinks", "k_scale", "v_scale")]
    return np.asarray(implementation(*inputs.arrays, *others, **options), np.float32)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference_over_several_tiles(name):
    case = CASES[name]
    inputs = make_inputs(case, seed=3)
    want = attend(reference.ragged_paged_attention, inputs)
    got = attend(inspect.unwrap(tpu.ragged_paged_attention), inputs, interpret=True)
    owned = sum(q_len for q_len, _ in case.rows)
    assert want[:owned].any() and not got[owned:].any()
    np.testing.assert_allclose(got, want, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("cores", [1, 2])
def test_copies_never_race_and_read_only_what_is_seen(cores, capfd, monkeypatch):
    """Page numbers outside of what a row sees are out of range: the simulator would refuse to read there."""
    window = 60
    inputs = make_inputs(replace(RACES, sliding_window=window), seed=4)
    want = attend(reference.ragged_paged_attention, inputs)
    page_indices = np.array(inputs.arrays[3])
    for row in range(len(page_indices)):
        q_len, kv_len = RACES.rows[row] if row < len(RACES.rows) else (0, 0)
        seen = np.arange(max(kv_len - q_len - window + 1, 0) // RACES.page_size, -(-kv_len // RACES.page_size))
        page_indices[row, ~np.isin(np.arange(page_indices.shape[1]), seen)] = 2**20
    arrays = (*inputs.arrays[:3], jnp.asarray(page_indices), *inputs.arrays[4:])
    monkeypatch.setattr(tpu, "PREFILL_ROWS", 4)
    interpret = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=cores)
    got = attend(inspect.unwrap(tpu.ragged_paged_attention), replace(inputs, arrays=arrays), interpret=interpret)
    assert "RACE" not in "".join(capfd.readouterr())
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=2e-5)


def test_writes_never_race(capfd, monkeypatch):
    monkeypatch.setattr(write_tpu, "TILE_BYTES", 1)  # 8 tokens a step
    rng = np.random.default_rng(0)
    angles = rng.uniform(-9, 9, (20, 32)).astype(np.float32)
    arrays = [
        jnp.asarray(rng.standard_normal((20, 2, 4, 128), np.float32)),
        jnp.cos(angles),
        jnp.sin(angles),
        jnp.asarray(rng.standard_normal((2, 5, 8, 4, 128), np.float32)),
        jnp.asarray(rng.permutation(40)[:20], jnp.int32),
        jnp.array([1], jnp.int32),
        None,
        None,
        None,
    ]
    want = write_reference.write_kv(*arrays)
    got = inspect.unwrap(write_tpu.write_kv)(*arrays, interpret=pltpu.InterpretParams(detect_races=True))
    assert "RACE" not in "".join(capfd.readouterr())
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), got, want)


def test_what_is_not_covered_is_named():
    inputs = make_inputs(replace(RACES, dtype="float16"), seed=0)
    with pytest.raises(NotImplementedError, match="float16"):
        attend(tpu.ragged_paged_attention, inputs, interpret=True)
