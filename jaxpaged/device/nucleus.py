"""Which tokens top-k, top-p and min-p keep of a row: always the first few by likelihood, among equals by id."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

FEW = 128  # so large a top_k is looked up in the sorted best ones, on CPU


class Limits(NamedTuple):
    """What a row asks for, and the scale of its logits.

    Attributes:
      peak: f32[], the largest logit.
      temperature: f32[], above 0.
      top_k: i32[], from 1 to V, which is off.
      top_p: f32[]; 1 is off.
      floor: f32[], least scaled logit (that of the best is 0); -inf is off.
      uses_top_k, uses_top_p: bool[], whether to look at them at all, see `over_rows`.
    """

    peak: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    floor: jax.Array
    uses_top_k: jax.Array
    uses_top_p: jax.Array

    def scaled(self, logits: jax.Array) -> jax.Array:
        """Logits over the temperature, that of the best being 0; cheaper to compute anew than to keep of all rows.

        The peak is subtracted first, so that a tiny temperature cannot overflow.
        """
        return (logits - self.peak) / self.temperature


def needed_mass(logits: jax.Array, limits: Limits) -> jax.Array:
    """The mass that top-p wants, out of what top-k and min-p keep; infinite where it is off.

    Args:
      logits: f32[V]; the mass is the exponential of the scaled ones.
    """

    def above_floor() -> jax.Array:
        scaled = limits.scaled(logits)
        return jnp.where(scaled >= limits.floor, scaled, -jnp.inf)

    def of_top_k() -> jax.Array:
        kth, missing = _kth(logits, limits.top_k)
        equal = jnp.exp(jnp.max(jnp.where(logits == kth, above_floor(), -jnp.inf)))
        return _mass(above_floor(), logits > kth) + missing * equal

    def needed() -> jax.Array:
        mass = jax.lax.cond(limits.uses_top_k, of_top_k, lambda: jnp.sum(jnp.exp(above_floor())))
        mass = jnp.maximum(limits.top_p * mass, jnp.finfo(jnp.float32).tiny)  # a tiny top_p still keeps one token
        return jnp.where(limits.top_p < 1, mass, jnp.inf)

    return jax.lax.cond(limits.uses_top_p, needed, lambda: jnp.float32(jnp.inf))


def exceeds(logits: jax.Array, token: jax.Array, limits: Limits, needed: jax.Array) -> jax.Array:
    """Whether a token is not among the kept ones: what comes before it is enough already.

    Args:
      needed: `needed_mass`.
    """

    def count() -> jax.Array:
        return jnp.sum(comes_before(logits, token), dtype=jnp.int32)

    def mass() -> jax.Array:
        return _mass(limits.scaled(logits), comes_before(logits, token))

    too_many = jax.lax.cond(limits.uses_top_k, lambda: count() >= limits.top_k, lambda: jnp.bool_(False))
    too_much = jax.lax.cond(limits.uses_top_p, lambda: mass() >= needed, lambda: jnp.bool_(False))
    return too_many | too_much | (limits.scaled(logits[token]) < limits.floor)


def comes_before(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Mask of the tokens that are more likely than `token`, or as likely with a lower id."""
    value = logits[token]
    return (logits > value) | ((logits == value) & (jnp.arange(len(logits)) < token))


class Last(NamedTuple):
    """The last kept token: those that come before it and itself are kept.

    Attributes:
      value: f32[], its logit.
      index: i32[]; tokens of this logit are kept up to it.
    """

    value: jax.Array
    index: jax.Array

    def includes(self, logits: jax.Array) -> jax.Array:
        """Mask of the tokens up to it."""
        return (logits > self.value) | ((logits == self.value) & (jnp.arange(len(logits)) <= self.index))


def all_kept(logits: jax.Array) -> Last:
    """Where there is no limit."""
    return Last(jnp.float32(-jnp.inf), jnp.int32(len(logits)))


def last_kept(logits: jax.Array, limits: Limits) -> Last:
    """The last token that top-k and top-p keep, out of what min-p keeps."""
    everything = all_kept(logits)
    ones = jnp.ones_like(logits)
    by_count = jax.lax.cond(
        limits.uses_top_k, lambda: _last(logits, ones, limits.top_k.astype(jnp.float32)), lambda: everything
    )

    def by_mass() -> Last:
        needed = needed_mass(logits, limits)
        weights = jnp.where(kept(logits, limits, by_count), jnp.exp(limits.scaled(logits)), 0.0)
        last = _last(logits, weights, needed)
        # By rounding it could be behind that of top-k.
        behind = (last.value < by_count.value) | ((last.value == by_count.value) & (last.index > by_count.index))
        return jax.tree.map(lambda a, b: jnp.where(behind | (needed == jnp.inf), a, b), by_count, last)

    return jax.lax.cond(limits.uses_top_p, by_mass, lambda: by_count)


def kept(logits: jax.Array, limits: Limits, last: Last) -> jax.Array:
    """Mask of all tokens that are kept, given `last_kept`."""
    return (logits > -jnp.inf) & (limits.scaled(logits) >= limits.floor) & last.includes(logits)


def _mass(scaled: jax.Array, mask: jax.Array) -> jax.Array:
    # Not `where(mask, exp(scaled), 0)`: XLA:CPU does not vectorize that.
    return jnp.sum(jnp.exp(jnp.where(mask, scaled, -jnp.inf)))


def _kth(logits: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The k-th largest logit, and how many equal to it are among the first k."""

    def search() -> tuple[jax.Array, jax.Array]:
        return _threshold(logits, jnp.ones_like(logits), k.astype(jnp.float32))

    def look_up() -> tuple[jax.Array, jax.Array]:
        best = jax.lax.top_k(logits, min(FEW, len(logits)))[0]
        kth = best[k - 1]
        return kth, (k - jnp.sum(best > kth)).astype(jnp.float32)

    return jax.lax.platform_dependent(cpu=lambda: jax.lax.cond(k <= FEW, look_up, search), default=search)


def _last(values: jax.Array, weights: jax.Array, needed: jax.Array) -> Last:
    """Of the fewest largest values whose weights together reach `needed`; the lowest ids of equals."""
    threshold, missing = _threshold(values, weights, needed)
    equal = values == threshold
    weight = jnp.max(jnp.where(equal, weights, 0.0))
    wanted = jnp.maximum(jnp.ceil(missing / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)), 1.0)
    return Last(threshold, _nth(equal, wanted))


def _nth(mask: jax.Array, n: jax.Array) -> jax.Array:
    """Index of the n-th true element; at least the length if there are fewer. Found bit by bit."""
    index = jnp.arange(len(mask))
    bits = len(mask).bit_length()

    def refine(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (1 << (bits - 1 - i))
        return jnp.where(jnp.sum(mask & (index < candidate)) < n, candidate, found)

    return jax.lax.fori_loop(0, bits, refine, jnp.int32(0))


def _threshold(values: jax.Array, weights: jax.Array, needed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The value down to which the weights reach `needed`, and what those above it leave missing.

    The least of all values if, by rounding, all weights together do not. It is built bit by bit, as an integer in the
    order of floats: 32 passes instead of a sort.
    """
    sign = jnp.uint32(0x80000000)

    def value(key: jax.Array) -> jax.Array:
        """NaN for the least and the largest keys; no value reaches these."""
        return jax.lax.bitcast_convert_type(jnp.where(key >= sign, key & ~sign, ~key), jnp.float32)

    def refine(i: jax.Array, key: jax.Array) -> jax.Array:
        candidate = key | (sign >> i.astype(jnp.uint32))
        return jnp.where(jnp.sum(jnp.where(values >= value(candidate), weights, 0.0)) >= needed, candidate, key)

    threshold = jnp.fmax(value(jax.lax.fori_loop(0, 32, refine, jnp.uint32(0))), jnp.min(values))
    return threshold, needed - jnp.sum(jnp.where(values > threshold, weights, 0.0))
