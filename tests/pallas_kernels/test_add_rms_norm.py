"""add_rms_norm against numpy, its implementations against each other, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_rms_norm

IMPLEMENTATIONS = ("reference", "xla", "gpu", "tpu")
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}


def make_inputs(seed: int, dims: int, dtype: str = "float32") -> list[jnp.ndarray]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((5, dims), (5, dims), (dims,))]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dims", "dtype", "offset"), [(64, "float32", 0.0), (576, "bfloat16", 0.0), (96, "float16", 1.0)]
)
def test_adds_and_norms(dims, dtype, offset, implementation):
    inputs = make_inputs(dims, dims, dtype)
    total, normed = add_rms_norm(*inputs, eps=1e-3, offset=offset, implementation=implementation, interpret=True)
    assert total.dtype == normed.dtype == dtype
    _, _, weight = (np.asarray(array, np.float64) for array in inputs)
    np.testing.assert_array_equal(total, inputs[0] + inputs[1])
    s = np.asarray(total, np.float64)
    want = s / np.sqrt((s * s).mean(-1, keepdims=True) + 1e-3) * (weight + offset)
    np.testing.assert_allclose(np.asarray(normed, np.float64), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dims", "dtype"), [(96, "float32"), (576, "bfloat16")])
def test_a_delta_with_a_norm_of_its_own(dims, dtype, implementation):
    """As the two operations one after the other, rounding in between included."""
    x, delta, weight = make_inputs(dims, dims, dtype)
    own = make_inputs(dims + 1, dims, dtype)[2]
    options = {"eps": 1e-3, "offset": 1.0, "implementation": implementation, "interpret": True}
    normed = add_rms_norm(jnp.zeros_like(x), delta, own, **options)[1]
    want = add_rms_norm(x, normed, weight, **options)
    got = add_rms_norm(x, delta, weight, delta_weight=own, **options)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == dtype
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_broken_token_stays_alone(implementation):
    x, delta, weight = make_inputs(1, 64)
    want = add_rms_norm(x, delta, weight, eps=1e-6, implementation=implementation, interpret=True)[1]
    got = add_rms_norm(x.at[2].set(jnp.nan), delta, weight, eps=1e-6, implementation=implementation, interpret=True)[1]
    assert np.isnan(got[2]).all()
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(want, 2, 0))


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, jnp.zeros((5, 2, 32)), r"\(5, 2, 32\)"),
        (0, jnp.zeros((5, 64), jnp.int32), "int32"),
        (1, jnp.zeros((4, 64)), r"\(4, 64\)"),
        (1, jnp.zeros((5, 64), jnp.bfloat16), "bfloat16"),
        (2, jnp.zeros((63,)), r"\(63,\)"),
        (3, jnp.zeros((63,)), r"delta_weight must have shape \(64,\), got \(63,\)"),
        (3, 1.0, "delta_weight must be an array, got 1.0"),
    ],
)
def test_bad_arguments_are_refused_by_value(index, value, message):
    inputs = [*make_inputs(0, 64), jnp.zeros(64)]
    inputs[index] = value
    with pytest.raises(ValueError, match=message):
        add_rms_norm(*inputs[:3], eps=1e-6, delta_weight=inputs[3])
