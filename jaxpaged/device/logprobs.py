"""Log-probabilities of a row: of its token, of the most likely ones, or of given ones; and their ranks."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpaged.device.rows import over_rows

_BLOCK, _LEAST_BLOCK = 64, 32


class Logprobs(NamedTuple):
    """Of a row, or with a leading [R] of R rows.

    Attributes:
      logprob: f32[], of the token.
      rank: i32[], 1 + the number of tokens that are more likely.
      top_ids, top_logprobs, top_ranks: i32/f32/i32[C], most likely first and the lowest id first among equals; or those
        asked for, in their order.
    """

    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    top_ranks: jax.Array


def token_logprobs(logits: jax.Array, tokens: jax.Array, *, vocab_size: int, columns: int) -> Logprobs:
    """Raw log-probabilities of given tokens, row by row.

    Args:
      logits: f32[R, V].
      tokens: i32[R].
      vocab_size: ids from there on are padding of the head.
      columns: C, how many of the most likely.
    """

    def row(logits: jax.Array, token: jax.Array) -> Logprobs:
        return top_logprobs(mask_padding(logits, vocab_size), token, columns)

    return over_rows(row, (logits, tokens))


def mask_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Bans the padding of the head, f32[..., V]."""
    if vocab_size == logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)


def top_logprobs(logits: jax.Array, token: jax.Array, columns: int) -> Logprobs:
    """Of `token` and the `columns` most likely ones; what the vocabulary does not have is id 0 at -inf."""
    best, ids = top_k(logits, min(columns, len(logits)))
    pad = (0, columns - len(ids))
    logprobs = jnp.pad(best - _normalizer(logits), pad, constant_values=-jnp.inf)
    ranks = 1 + jnp.arange(columns, dtype=jnp.int32)
    return Logprobs(*_of_token(logits, token), jnp.pad(ids, pad), logprobs, ranks)


def top_k(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest of f32[V] and their indices, in order; the lowest index first among equals, also of zeros.

    They lie in as many blocks, those with the largest maxima: only these are sorted, which are a small part of all.
    """
    block = math.gcd(len(values), _BLOCK)
    if block < _LEAST_BLOCK or 2 * count * block > len(values):
        return jax.lax.top_k(_unsigned_zeros(values), count)
    blocks = values.reshape(-1, block)
    maxima = _unsigned_zeros(jnp.max(blocks, axis=-1))
    chosen = jnp.sort(jax.lax.top_k(maxima, count)[1])  # by index again, for the sake of equals
    best, at = jax.lax.top_k(_unsigned_zeros(blocks[chosen].reshape(-1)), count)
    return best, chosen[at // block] * block + at % block


def _unsigned_zeros(values: jax.Array) -> jax.Array:
    """`lax.top_k` would put -0 after 0, whatever their indices."""
    return jnp.where(values == 0, 0.0, values)


def sampled_logprob(logits: jax.Array, token: jax.Array, columns: int) -> Logprobs:
    """Of `token` alone."""
    logprob, rank = _of_token(logits, token)
    return no_logprobs(columns)._replace(logprob=logprob, rank=rank)


def given_logprobs(logits: jax.Array, token: jax.Array, ids: jax.Array, columns: int) -> Logprobs:
    """Of `token` and of the first `columns` of `ids`, i32[n]; those outside the vocabulary (NO_TOKEN) are padding."""
    ids = ids[:columns]
    size, pad = len(logits), (0, columns - len(ids))
    wanted = ids < size
    values = jnp.where(wanted, logits.at[ids].get(mode="clip"), -jnp.inf)

    def rank(i: jax.Array, ranks: jax.Array) -> jax.Array:
        return ranks.at[i].set(1 + jnp.sum(logits > values[i], dtype=jnp.int32))

    count = jnp.sum(wanted, dtype=jnp.int32)
    ranks = jax.lax.fori_loop(0, count, rank, jnp.zeros(len(ids), jnp.int32))
    logprobs = jnp.pad(values - _normalizer(logits), pad, constant_values=-jnp.inf)
    return Logprobs(*_of_token(logits, token), jnp.pad(jnp.where(wanted, ids, 0), pad), logprobs, jnp.pad(ranks, pad))


def no_logprobs(columns: int) -> Logprobs:
    """Zeros, for a row that wants none."""
    return Logprobs(
        logprob=jnp.zeros((), jnp.float32),
        rank=jnp.zeros((), jnp.int32),
        top_ids=jnp.zeros(columns, jnp.int32),
        top_logprobs=jnp.zeros(columns, jnp.float32),
        top_ranks=jnp.zeros(columns, jnp.int32),
    )


def _of_token(logits: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    value = logits[jnp.maximum(token, 0)]
    return value - _normalizer(logits), 1 + jnp.sum(logits > value, dtype=jnp.int32)


def _normalizer(logits: jax.Array) -> jax.Array:
    """Logarithm of the sum of exponentials."""
    peak = jnp.max(logits)
    return peak + jnp.log(jnp.sum(jnp.exp(logits - peak)))
