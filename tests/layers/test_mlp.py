"""The gated feed-forward layer against its formula."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.layers.mlp import ACTIVATIONS, MLP

_erf = np.vectorize(math.erf)
FORMULAS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + _erf(x / np.sqrt(2))),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}
ALIASES = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_equals_its_formula(name: str):
    x = np.linspace(-4, 4, 33).astype(np.float32)
    expected = FORMULAS[ALIASES.get(name, name)](x.astype(np.float64))
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x)), expected, atol=1e-6)


def test_mlp_equals_its_formula():
    rng = np.random.default_rng(0)
    shapes = {"gate_up": (2, 6, 4), "down": (4, 6), "gate_up_bias": (2, 6), "down_bias": (4,)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    x = rng.normal(size=(5, 4)).astype(np.float32)
    mlp = MLP(4, 6, "silu", use_bias=True, dtype=jnp.float32)
    gate, up = (x @ params["gate_up"][i].T + params["gate_up_bias"][i] for i in range(2))
    expected = (FORMULAS["silu"](gate) * up) @ params["down"].T + params["down_bias"]
    y = jax.jit(mlp.apply)({"params": params}, x)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
