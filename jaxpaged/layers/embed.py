"""Token ids to vectors, and vectors to logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpaged.layers.linear import project


def embed_tokens(embed: jax.Array, token_ids: jax.Array, *, scale: float | None = None) -> jax.Array:
    """Rows of embed [V, D] for token_ids i32[T]: [T, D], times `scale` (rounded to embed's dtype, as Gemma does).

    Ids must lie in [0, V): they are checked where requests enter, not here.
    """
    x = embed.at[token_ids].get(mode="promise_in_bounds")
    return x if scale is None else x * jnp.asarray(scale, x.dtype)


def unembed(hidden: jax.Array, lm_head: jax.Array, *, soft_cap: float | None = None) -> jax.Array:
    """Logits of hidden [..., D] under lm_head [V, D]: float32 [..., V], squashed into +-soft_cap if given."""
    logits = project(hidden, lm_head, dtype=jnp.float32)
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
