"""Embedding and logits."""

import jax.numpy as jnp
import numpy as np

from jaxpaged.layers.embed import embed_tokens, unembed


def test_embedding_is_scaled_in_its_own_dtype():
    table = jnp.arange(12, dtype=jnp.bfloat16).reshape(4, 3)
    x = embed_tokens(table, jnp.array([3, 0], jnp.int32), scale=3072**0.5)
    assert x.dtype == jnp.bfloat16
    np.testing.assert_array_equal(x, table[jnp.array([3, 0])] * jnp.bfloat16(55.5))  # sqrt(3072) = 55.43 rounds so


def test_logits_are_float32_and_capped():
    hidden, head = jnp.full((2, 1, 4), 2.0, jnp.bfloat16), jnp.ones((5, 4), jnp.bfloat16)
    logits = unembed(hidden, head)
    assert logits.dtype == jnp.float32 and logits.shape == (2, 1, 5)
    np.testing.assert_allclose(logits, 8.0)
    np.testing.assert_allclose(unembed(hidden, head, soft_cap=3.0), 3 * np.tanh(8 / 3), rtol=1e-6)
