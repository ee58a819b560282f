"""Logits to tokens and log-probabilities: pure functions, row by row, on padded rows.

Order: raw logits in float32 -> vocabulary padding -> min_tokens -> (greedy?) -> temperature -> min_p -> top_k ->
top_p -> sample. What no row asks for costs nothing: it sits under `lax.cond`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpaged.device.logits_processor import LogitsProcessor
from jaxpaged.device.options import Options
from jaxpaged.device.slots import NO_TOKEN, Feature, Slots


class Sampled(NamedTuple):
    """Result for R rows; log-probabilities are of the raw logits, and zeros unless some row wants them.

    Attributes:
      tokens: i32[R]; -1 where the logits are NaN, infinite, or all banned.
      logprobs: f32[R], of the sampled token.
      ranks: i32[R], 1 + the number of tokens that are more likely.
      top_ids, top_logprobs, top_ranks: i32/f32/i32[R, max_logprobs], most likely first.
    """

    tokens: jax.Array
    logprobs: jax.Array
    ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    top_ranks: jax.Array


def sample(
    logits: jax.Array,
    slots: Slots,
    options: Options,
    rows: jax.Array,
    positions: jax.Array,
    masks: jax.Array,
    *,
    vocab_size: int,
    max_logprobs: int,
    processors: Sequence[LogitsProcessor] = (),
) -> Sampled:
    """Samples a token per row.

    Args:
      logits: f32[R, V], raw.
      slots: the slots' sampling parameters.
      options: the slots' wide ones.
      rows: i32[R], each row's slot.
      positions: i32[R], the sequence position that the new token will take.
      masks: i32[R, ceil(V / 32)], what the rows with a grammar may produce; bit i of word w is token 32 w + i.
      vocab_size: tokens that may be produced; ids from there on are padding of the matrix.
      max_logprobs: columns of the top log-probabilities.
      processors: those that rows may ask for.
    """
    if vocab_size < logits.shape[-1]:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)
    allowed = _ban_stops(logits, slots, rows, positions)
    best, peak = argmax(allowed)
    greedy = slots.column("features", rows) & Feature.RANDOM == 0
    tokens = jax.lax.cond(
        jnp.all(greedy),
        lambda: best,
        lambda: jnp.where(greedy, best, _draw(allowed, peak, slots, rows, positions)),
    )
    tokens = jnp.where(jnp.isfinite(peak), tokens, -1)
    return jax.lax.cond(
        jnp.any(slots.column("features", rows) & Feature.LOGPROBS != 0),
        lambda: Sampled(tokens, *_logprobs(logits, tokens, max_logprobs)),
        lambda: Sampled(tokens, *_no_logprobs(tokens, max_logprobs)),
    )


def argmax(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index and value of each row's maximum; the lowest index wins a tie.

    Two plain reductions: XLA:CPU does not vectorize the variadic one that `jnp.argmax` lowers to.
    """
    size = values.shape[-1]
    peak = jnp.max(values, axis=-1)
    index = jnp.min(jnp.where(values == peak[:, None], jnp.arange(size, dtype=jnp.int32), size), axis=-1)
    return jnp.minimum(index, size - 1), peak


def request_keys(seed_high: jax.Array, seed_low: jax.Array, positions: jax.Array) -> jax.Array:
    """A key per row, from the request's seed, sample index (0) and position only: never from the batch."""
    data = jnp.stack([seed_high, seed_low], -1).astype(jnp.uint32)
    keys = jax.random.wrap_key_data(data, impl="threefry2x32")
    return jax.vmap(lambda key, position: jax.random.fold_in(jax.random.fold_in(key, 0), position))(keys, positions)


def _ban_stops(logits: jax.Array, slots: Slots, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """Bans every id that would end a row which has not reached its min_tokens."""
    early = positions < slots.column("min_total_tokens", rows)

    def ban() -> jax.Array:
        ids = jnp.where(early[:, None], slots.stop_ids[rows], NO_TOKEN)
        return logits.at[jnp.arange(len(rows))[:, None], ids].set(-jnp.inf, mode="drop")

    return jax.lax.cond(jnp.any(early), ban, lambda: logits)


def _draw(logits: jax.Array, peak: jax.Array, slots: Slots, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """Draws from the processed distribution by Gumbel-max."""
    temperature = slots.column("temperature", rows)
    # The peak is subtracted first, so that a tiny temperature cannot overflow; greedy rows are overwritten later.
    scaled = (logits - peak[:, None]) / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    top_k, top_p, min_p = (slots.column(name, rows) for name in ("top_k", "top_p", "min_p"))
    vocab_size = logits.shape[-1]
    top_k = jnp.where(top_k == 0, vocab_size, jnp.minimum(top_k, vocab_size))
    scaled = jax.lax.cond(
        jnp.any(min_p > 0),
        lambda: jnp.where(scaled >= jnp.log(min_p)[:, None], scaled, -jnp.inf),
        lambda: scaled,
    )
    scaled = jax.lax.cond(
        jnp.any((top_k < vocab_size) | (top_p < 1)), lambda: _top_k_top_p(scaled, top_k, top_p), lambda: scaled
    )
    keys = request_keys(slots.column("seed_high", rows), slots.column("seed_low", rows), positions)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32))(keys)
    return argmax(scaled + noise)[0]


def _top_k_top_p(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keeps exactly the `top_k` most likely of each row, then the fewest of these with a mass of at least `top_p`.

    Among equals the lowest ids are kept. Both are one search with other weights: a loop of two compiles it once.
    """

    def cut(i: jax.Array, scaled: jax.Array) -> jax.Array:
        by_rank, off = i == 0, jnp.where(i == 0, top_k >= scaled.shape[-1], top_p >= 1)
        weights = jnp.where(by_rank, 1.0, jnp.exp(scaled))
        needed = jnp.where(by_rank, top_k.astype(jnp.float32), top_p * jnp.sum(weights, -1))
        needed = jnp.maximum(needed, jnp.finfo(jnp.float32).tiny)  # a top_p that underflows still keeps one token
        return jnp.where(_heaviest(scaled, weights, needed) | off[:, None], scaled, -jnp.inf)

    return jax.lax.fori_loop(0, 2, cut, scaled)


def _heaviest(values: jax.Array, weights: jax.Array, needed: jax.Array) -> jax.Array:
    """Mask of the largest values whose weights together reach `needed`, per row.

    The threshold is built bit by bit on an order-preserving integer image of the floats: 32 passes instead of a
    sort. Equal values have equal weights; of those at the threshold the lowest indices are kept.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    keys = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))  # unsigned order = float order

    def refine(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        mass = jnp.sum(jnp.where(keys >= candidate[:, None], weights, 0.0), -1)
        return jnp.where(mass >= needed, candidate, threshold)

    threshold = jax.lax.fori_loop(0, 32, refine, jnp.zeros(len(values), jnp.uint32))[:, None]
    above, equal = keys > threshold, keys == threshold
    missing = needed - jnp.sum(jnp.where(above, weights, 0.0), -1)
    weight = jnp.max(jnp.where(equal, weights, 0.0), -1)
    wanted = jnp.maximum(jnp.ceil(missing / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)), 1.0)
    return jax.lax.cond(
        jnp.all(jnp.sum(equal, -1) <= wanted),
        lambda: above | equal,
        lambda: above | (equal & (jnp.cumsum(equal, -1) <= wanted[:, None])),
    )


def _logprobs(logits: jax.Array, tokens: jax.Array, max_logprobs: int) -> tuple[jax.Array, ...]:
    """Log-probability and rank of each token, and the best `max_logprobs`."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], -1)
    ranks = 1 + jnp.sum(logprobs > chosen, -1, dtype=jnp.int32)
    top_logprobs, top_ids = jax.lax.top_k(logprobs, min(max_logprobs, logits.shape[-1]))
    pad = ((0, 0), (0, max_logprobs - top_ids.shape[1]))
    return (
        chosen[:, 0],
        ranks,
        jnp.pad(top_ids, pad),
        jnp.pad(top_logprobs, pad, constant_values=-jnp.inf),
        jnp.zeros_like(jnp.pad(top_ids, pad)),
    )


def _no_logprobs(tokens: jax.Array, max_logprobs: int) -> tuple[jax.Array, ...]:
    n = len(tokens)
    return (
        jnp.zeros(n, jnp.float32),
        jnp.zeros(n, jnp.int32),
        jnp.zeros((n, max_logprobs), jnp.int32),
        jnp.zeros((n, max_logprobs), jnp.float32),
        jnp.zeros((n, max_logprobs), jnp.int32),
    )
