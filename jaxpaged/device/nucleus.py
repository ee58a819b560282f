"""Which tokens top-k, top-p and min-p keep of a row: always the first few by likelihood, among equals by id."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Limits(NamedTuple):
    """What a row asks for.

    Attributes:
      top_k: i32[], at least 1; V or more is off.
      top_p: f32[]; 1 is off.
      floor: f32[], least scaled logit (that of the best is 0); -inf is off.
    """

    top_k: jax.Array
    top_p: jax.Array
    floor: jax.Array


def limits(top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> Limits:
    """From a request's parameters; top_k 0 is off."""
    return Limits(jnp.where(top_k == 0, jnp.iinfo(jnp.int32).max, top_k), top_p, jnp.log(min_p))


def needed_mass(logits: jax.Array, scaled: jax.Array, limit: Limits) -> jax.Array:
    """The mass that top-p wants, out of what top-k and min-p keep; infinite where it is off.

    Args:
      logits: f32[V], whose order counts.
      scaled: f32[V], of which the mass is the exponential.
    """
    above_floor = jnp.where(scaled >= limit.floor, jnp.exp(scaled), 0.0)

    def of_top_k() -> jax.Array:
        kth, missing = _threshold(logits, jnp.ones_like(logits), limit.top_k.astype(jnp.float32))
        equal = jnp.max(jnp.where(logits == kth, above_floor, 0.0))
        return jnp.sum(jnp.where(logits > kth, above_floor, 0.0)) + missing * equal

    def needed() -> jax.Array:
        mass = jax.lax.cond(limit.top_k < len(logits), of_top_k, lambda: jnp.sum(above_floor))
        return jnp.maximum(limit.top_p * mass, jnp.finfo(jnp.float32).tiny)  # a tiny top_p still keeps one token

    return jax.lax.cond(limit.top_p < 1, needed, lambda: jnp.float32(jnp.inf))


def exceeds(logits: jax.Array, scaled: jax.Array, token: jax.Array, limit: Limits, needed: jax.Array) -> jax.Array:
    """Whether a token is not among the kept ones: what comes before it is enough already.

    Args:
      needed: `needed_mass`.
    """
    before = comes_before(logits, logits[token], token)
    count = jax.lax.cond(limit.top_k < len(logits), lambda: jnp.sum(before, dtype=jnp.int32), lambda: jnp.int32(0))
    mass = jax.lax.cond(
        limit.top_p < 1, lambda: jnp.sum(jnp.where(before, jnp.exp(scaled), 0.0)), lambda: jnp.float32(0)
    )
    return (count >= limit.top_k) | (mass >= needed) | (scaled[token] < limit.floor)


def comes_before(logits: jax.Array, value: jax.Array, token: jax.Array) -> jax.Array:
    """Mask of the tokens that are more likely than `token` with logit `value`, or as likely with a lower id."""
    return (logits > value) | ((logits == value) & (jnp.arange(len(logits)) < token))


def kept(logits: jax.Array, scaled: jax.Array, limit: Limits, needed: jax.Array) -> jax.Array:
    """Mask of all tokens that are kept."""
    size = len(logits)
    mask = (logits > -jnp.inf) & (scaled >= limit.floor)
    mask = jax.lax.cond(
        limit.top_k < size,
        lambda: mask & _first(logits, jnp.ones_like(logits), limit.top_k.astype(jnp.float32)),
        lambda: mask,
    )
    return jax.lax.cond(
        limit.top_p < 1, lambda: mask & _first(logits, jnp.where(mask, jnp.exp(scaled), 0.0), needed), lambda: mask
    )


def _first(values: jax.Array, weights: jax.Array, needed: jax.Array) -> jax.Array:
    """Mask of the fewest largest values whose weights together reach `needed`; the lowest ids of equals."""
    threshold, missing = _threshold(values, weights, needed)
    equal = values == threshold
    weight = jnp.max(jnp.where(equal, weights, 0.0))
    wanted = jnp.maximum(jnp.ceil(missing / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)), 1.0)
    first = jax.lax.cond(jnp.sum(equal) <= wanted, lambda: equal, lambda: equal & (jnp.cumsum(equal) <= wanted))
    return (values > threshold) | first


def _threshold(values: jax.Array, weights: jax.Array, needed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The value down to which the weights reach `needed`, and what those above it leave missing.

    It is built bit by bit on an order-preserving integer image of the floats: 32 passes instead of a sort.
    """
    values = jnp.where(values == 0, 0.0, values)  # -0 and 0 are equals
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    keys = jnp.where(bits >= sign, ~bits, bits | sign)  # unsigned order = float order

    def refine(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (sign >> i.astype(jnp.uint32))
        return jnp.where(jnp.sum(jnp.where(keys >= candidate, weights, 0.0)) >= needed, candidate, threshold)

    key = jax.lax.fori_loop(0, 32, refine, jnp.uint32(0))
    missing = needed - jnp.sum(jnp.where(keys > key, weights, 0.0))
    return jax.lax.bitcast_convert_type(jnp.where(key >= sign, key & ~sign, ~key), jnp.float32), missing
