"""Which tokens top-k, top-p and min-p keep of a row: always the first few by likelihood, among equals by id."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

FEW = 128  # so large a top_k is looked up in the sorted best ones, on CPU


class Limits(NamedTuple):
    """What a row asks for.

    Attributes:
      top_k: i32[], from 1 to V, which is off.
      top_p: f32[]; 1 is off.
      floor: f32[], least scaled logit (that of the best is 0); -inf is off.
      uses_top_k, uses_top_p: bool[], whether to look at them at all, see `over_rows`.
    """

    top_k: jax.Array
    top_p: jax.Array
    floor: jax.Array
    uses_top_k: jax.Array
    uses_top_p: jax.Array


def needed_mass(logits: jax.Array, scaled: jax.Array, limits: Limits) -> jax.Array:
    """The mass that top-p wants, out of what top-k and min-p keep; infinite where it is off.

    Args:
      logits: f32[V], whose order counts.
      scaled: f32[V], of which the mass is the exponential.
    """

    def of_top_k(above_floor: jax.Array) -> jax.Array:
        kth, missing = _kth(logits, limits.top_k)
        equal = jnp.exp(jnp.max(jnp.where(logits == kth, above_floor, -jnp.inf)))
        return _mass(above_floor, logits > kth) + missing * equal

    def needed() -> jax.Array:
        above_floor = jnp.where(scaled >= limits.floor, scaled, -jnp.inf)
        mass = jax.lax.cond(limits.uses_top_k, of_top_k, lambda x: jnp.sum(jnp.exp(x)), above_floor)
        mass = jnp.maximum(limits.top_p * mass, jnp.finfo(jnp.float32).tiny)  # a tiny top_p still keeps one token
        return jnp.where(limits.top_p < 1, mass, jnp.inf)

    return jax.lax.cond(limits.uses_top_p, needed, lambda: jnp.float32(jnp.inf))


def exceeds(logits: jax.Array, scaled: jax.Array, token: jax.Array, limits: Limits, needed: jax.Array) -> jax.Array:
    """Whether a token is not among the kept ones: what comes before it is enough already.

    Args:
      needed: `needed_mass`.
    """

    def count() -> jax.Array:
        return jnp.sum(comes_before(logits, token), dtype=jnp.int32)

    def mass() -> jax.Array:
        return _mass(scaled, comes_before(logits, token))

    too_many = jax.lax.cond(limits.uses_top_k, lambda: count() >= limits.top_k, lambda: jnp.bool_(False))
    too_much = jax.lax.cond(limits.uses_top_p, lambda: mass() >= needed, lambda: jnp.bool_(False))
    return too_many | too_much | (scaled[token] < limits.floor)


def comes_before(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Mask of the tokens that are more likely than `token`, or as likely with a lower id."""
    value = logits[token]
    return (logits > value) | ((logits == value) & (jnp.arange(len(logits)) < token))


def kept(logits: jax.Array, scaled: jax.Array, limits: Limits, needed: jax.Array) -> jax.Array:
    """Mask of all tokens that are kept."""
    mask = (logits > -jnp.inf) & (scaled >= limits.floor)
    ones = jnp.ones_like(logits)
    mask = jax.lax.cond(
        limits.uses_top_k, lambda: mask & _first(logits, ones, limits.top_k.astype(jnp.float32)), lambda: mask
    )

    def by_mass() -> jax.Array:
        return mask & (_first(logits, jnp.where(mask, jnp.exp(scaled), 0.0), needed) | (needed == jnp.inf))

    return jax.lax.cond(limits.uses_top_p, by_mass, lambda: mask)


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


def _first(values: jax.Array, weights: jax.Array, needed: jax.Array) -> jax.Array:
    """Mask of the fewest largest values whose weights together reach `needed`; the lowest ids of equals."""
    threshold, missing = _threshold(values, weights, needed)
    equal = values == threshold
    weight = jnp.max(jnp.where(equal, weights, 0.0))
    wanted = jnp.maximum(jnp.ceil(missing / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)), 1.0)
    return (values > threshold) | (equal & (jnp.arange(len(values)) <= _nth(equal, wanted)))


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

    The least of all values if, by rounding, all weights together do not. It is built bit by bit on an order-preserving
    integer image of the floats: 32 passes instead of a sort.
    """
    values = jnp.where(values == 0, 0.0, values)  # -0 and 0 are equals
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    keys = jnp.where(bits >= sign, ~bits, bits | sign)  # unsigned order = float order

    def refine(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (sign >> i.astype(jnp.uint32))
        return jnp.where(jnp.sum(jnp.where(keys >= candidate, weights, 0.0)) >= needed, candidate, threshold)

    key = jnp.maximum(jax.lax.fori_loop(0, 32, refine, jnp.uint32(0)), jnp.min(keys))
    missing = needed - jnp.sum(jnp.where(keys > key, weights, 0.0))
    return jax.lax.bitcast_convert_type(jnp.where(key >= sign, key & ~sign, ~key), jnp.float32), missing
