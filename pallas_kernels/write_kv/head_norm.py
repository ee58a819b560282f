"""The RMS norm that some models put on every query and key head before its rotation (Qwen3, Gemma 3)."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(jax.tree_util.register_dataclass, data_fields=("q", "k"), meta_fields=("eps", "offset"))
@dataclass(frozen=True)
class HeadNorm:
    """x / rms(x) * (offset + weight) over each head, in float32, rounded to the dtype of x.

    Attributes:
      q, k: [H] weights for queries and for keys, of a float dtype.
      eps: added to the mean square.
      offset: 1 for models that store their weights less one (Gemma).
    """

    q: jax.Array
    k: jax.Array
    eps: float
    offset: float = 0.0

    def __call__(self, qkv: jax.Array) -> jax.Array:
        """qkv [T, K, G + 2, H] with queries and keys normed."""
        x = qkv[:, :, :-1].astype(jnp.float32)
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        weights = jnp.stack([self.q] * (x.shape[2] - 1) + [self.k]).astype(jnp.float32)
        x = (x * (weights + self.offset if self.offset else weights)).astype(qkv.dtype)
        return jnp.concatenate([x, qkv[:, :, -1:]], axis=2)
