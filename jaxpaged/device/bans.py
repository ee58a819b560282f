"""Tokens that a row must not produce: their logits become -inf."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpaged.device.slots import NO_TOKEN


def keep_masked(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Bans what is not in the bit mask, i32[ceil(V / 32)]: bit i of word w is token 32 w + i."""
    bits = (mask[:, None] >> jnp.arange(32)) & 1
    return jnp.where(bits.reshape(-1)[: len(logits)] != 0, logits, -jnp.inf)


def ban_ids(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Bans ids; those outside the vocabulary (NO_TOKEN) are dropped."""
    return logits.at[ids].set(-jnp.inf, mode="drop")


def bad_word_ends(
    tokens: jax.Array, left: jax.Array, history: jax.Array, num_tokens: jax.Array, num_prompt_tokens: jax.Array
) -> jax.Array:
    """The last token of each bad word whose other tokens end the output; elsewhere NO_TOKEN.

    Args:
      tokens, left: i32[n], tokens of all words, and how many of its word come after each, as in `Options`.
      history: i32[max_model_len].
    """
    position = num_tokens - left  # where the token is, if its word is about to be completed
    found = (position >= num_prompt_tokens) & (history.at[position].get(mode="clip") == tokens)
    missing = (left > 0) & ~found
    word = jnp.cumsum(left == 0) - (left == 0)  # a word ends where nothing is left
    complete = jnp.zeros(len(tokens), jnp.int32).at[word].add(missing)[word] == 0
    return jnp.where((left == 0) & complete, tokens, NO_TOKEN)
