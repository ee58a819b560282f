"""RMS norm against its formula."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.layers.norm import rms_norm


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_equals_the_formula(offset: float):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(3, 16)).astype(np.float32), rng.normal(size=16).astype(np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3) * (offset + w)
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(w), 1e-3, offset=offset), expected, rtol=1e-5)


def test_a_wider_weight_norms_over_all_its_axes():
    x = np.random.default_rng(1).normal(size=(3, 2, 4, 8)).astype(np.float32)
    w = np.random.default_rng(2).normal(size=(2, 4, 8)).astype(np.float32)
    flat = rms_norm(jnp.asarray(x.reshape(3, 64)), jnp.asarray(w.reshape(64)), 1e-6)
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(w), 1e-6).reshape(3, 64), flat, rtol=1e-6)


def test_bfloat16_is_normed_in_float32():
    x = jnp.full((1, 256), 300.0, jnp.bfloat16)  # the sum of squares would lose its tail in bfloat16
    y = rms_norm(x, jnp.ones(256, jnp.bfloat16), 1e-6)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y, np.float32), 1.0)
