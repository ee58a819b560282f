"""The gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpaged.layers.axes import declare
from jaxpaged.layers.linear import project

_gelu_tanh = partial(jax.nn.gelu, approximate=True)

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": jax.nn.relu,
}
"""Hugging Face's name of an activation -> the function."""


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up in one product.

    Attributes:
      hidden_size, intermediate_size: D and F.
      activation: a key of `ACTIVATIONS`.
      use_bias: on all three projections.
    """

    hidden_size: int
    intermediate_size: int
    activation: str = "silu"
    use_bias: bool = False
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, D] -> [T, D]."""
        d, f = self.hidden_size, self.intermediate_size
        gate_up = declare(self, "gate_up", (2, f, d), (None, "ffn", "embed"), self.dtype)
        down = declare(self, "down", (d, f), ("embed", "ffn"), self.dtype)
        gate_up_bias = down_bias = None
        if self.use_bias:
            gate_up_bias = declare(self, "gate_up_bias", (2, f), (None, "ffn"), self.dtype)
            down_bias = declare(self, "down_bias", (d,), ("embed",), self.dtype)
        with jax.named_scope("gate_up"):
            y = project(x, gate_up, gate_up_bias)
            # In float32 inside the fusion: the tail of silu or gelu loses most of its bits in bfloat16.
            gate, up = y[:, 0].astype(jnp.float32), y[:, 1].astype(jnp.float32)
            y = (ACTIVATIONS[self.activation](gate) * up).astype(x.dtype)
        with jax.named_scope("down"):
            return project(y, down, down_bias)
