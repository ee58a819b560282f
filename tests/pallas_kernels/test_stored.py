"""What kernels do by hand where a chip has no cast, against the casts of the numpy dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.pool import to_storage
from pallas_kernels.stored import casts_e4m3, narrow, widen

OLD, NEW = "NVIDIA A100-SXM4-80GB", "NVIDIA H200"


@pytest.mark.parametrize("kind", [OLD, NEW])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_code_of_e4m3_widens_exactly(kind, dtype):
    codes = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)
    with tuning.device(kind):
        got = widen(jnp.asarray(codes), dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), codes.astype(np.float32))


@pytest.mark.parametrize("kind", [OLD, NEW])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "uint16", "bfloat16", "float16"])
def test_narrows_as_the_pool_does(kind, dtype):
    """Among them ties, subnormal numbers, and what is out of range."""
    random = np.random.default_rng(0)
    codes = np.arange(0x7F, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    middles = (codes[1:] + codes[:-1]) / 2
    x = np.concatenate([codes, middles, random.standard_normal(500), 10.0 ** random.uniform(-5, 4, 500), [1e30, 0]])
    x = jnp.asarray(np.concatenate([x, -x]), jnp.float32)
    with tuning.device(kind):
        got = jax.jit(narrow, static_argnums=1)(x, jnp.dtype(dtype))
    want = to_storage(x, None, dtype)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


@pytest.mark.parametrize("kind", [OLD, NEW])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_nan_stays_nan(kind, dtype):
    with tuning.device(kind):
        assert np.isnan(np.asarray(narrow(jnp.array([jnp.nan]), dtype), np.float32)).all()


def test_chips_with_casts():
    have = ["NVIDIA H100 80GB HBM3", NEW, "NVIDIA GH200 480GB", "NVIDIA B200", "NVIDIA L4", "NVIDIA L40S"]
    have += ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090", "NVIDIA RTX 6000 Ada Generation"]
    lack = [OLD, "NVIDIA A10G", "NVIDIA GeForce RTX 3090", "NVIDIA RTX A6000", "Tesla V100-SXM2-16GB", "cpu"]
    assert all(map(casts_e4m3, have)) and not any(map(casts_e4m3, lack))
