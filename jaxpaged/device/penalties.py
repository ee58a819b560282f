"""Presence, frequency and repetition penalties, counted anew each step from the slot's history.

Nothing is kept between steps, so neither preemption nor the batch nor the slot can matter, and the cost follows
the context.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 128  # tokens that are counted at once


def penalize(
    logits: jax.Array,
    history: jax.Array,
    slot: jax.Array,
    num_tokens: jax.Array,
    num_prompt_tokens: jax.Array,
    *,
    presence: jax.Array,
    frequency: jax.Array,
    repetition: jax.Array,
    limit: jax.Array,
) -> jax.Array:
    """One row's logits, less likely where their tokens have been.

    Repetition sees prompt and output: it divides positive logits and multiplies negative ones, once. Presence and
    frequency see the output only.

    Args:
      logits: f32[V].
      history: i32[slots, max_model_len]; of the row's slot, i32[], the first `num_tokens` count.
      limit: i32[], at least `num_tokens`: how far to look.
    """
    counts, seen = _occurrences(len(logits), history, slot, num_tokens, num_prompt_tokens, limit)
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    # Not `counts > 0`: XLA would keep the zeros that counting began with, to compare with them.
    return logits - presence * (counts >= 1) - frequency * counts.astype(jnp.float32)


def _occurrences(
    vocab: int,
    history: jax.Array,
    slot: jax.Array,
    num_tokens: jax.Array,
    num_prompt_tokens: jax.Array,
    limit: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """How often each token is in the output, i32[V], and whether it is in prompt or output, bool[V]."""

    def count(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        counts, seen = state
        position = i * CHUNK + jnp.arange(CHUNK)
        tokens = history.at[slot, position].get(mode="clip")
        ids = jnp.where(position < num_tokens, tokens, vocab)  # those beyond are dropped
        is_output = (position >= num_prompt_tokens).astype(jnp.int32)
        return counts.at[ids].add(is_output, mode="drop"), seen.at[ids].set(True, mode="drop")

    empty = jnp.zeros(vocab, jnp.int32), jnp.zeros(vocab, bool)
    return jax.lax.fori_loop(0, (limit + CHUNK - 1) // CHUNK, count, empty)
