"""The token of a row: the most likely one, or a random one by Gumbel-max, the best of its logits plus noise."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxpaged.core.step import NOT_FINITE
from jaxpaged.device.gumbel import Words, gumbel
from jaxpaged.device.logprobs import mask_padding
from jaxpaged.device.nucleus import Limits, comes_before, exceeds, needed_mass

_BLOCK, _LEAST_BLOCK = 512, 32


def argmax(values: jax.Array, size: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Index and value of the maximum along the last axis; the lowest index wins a tie.

    On CPU the maxima of blocks come first, in one pass over the values, and then only the best block is looked at.

    Args:
      size: only the first so many values count.
    """
    size = values.shape[-1] if size is None else size
    block = math.gcd(values.shape[-1], _BLOCK)
    if block < _LEAST_BLOCK:
        return _first_of_largest(mask_padding(values, size))
    return jax.lax.platform_dependent(
        values,
        cpu=lambda values: _argmax_of_blocks(values, size, block),
        default=lambda values: _first_of_largest(mask_padding(values, size)),
    )


def _argmax_of_blocks(values: jax.Array, size: int, block: int) -> tuple[jax.Array, jax.Array]:
    blocks = values.reshape(*values.shape[:-1], -1, block)
    maxima = jnp.max(mask_padding(values, size).reshape(blocks.shape), axis=-1)
    best, peak = _first_of_largest(maxima)
    # Taken from the values themselves: the masked ones would have to be stored.
    chosen = jnp.take_along_axis(blocks, best[..., None, None], axis=-2).squeeze(-2)
    indices = best[..., None] * block + jnp.arange(block, dtype=jnp.int32)
    index, _ = _first_of_largest(jnp.where(indices < size, chosen, -jnp.inf))
    return best * block + index, peak


def _first_of_largest(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two plain reductions: XLA:CPU does not vectorize the variadic one that `jnp.argmax` lowers to."""
    size = values.shape[-1]
    peak = jnp.max(values, axis=-1)
    index = jnp.min(jnp.where(values == peak[..., None], jnp.arange(size, dtype=jnp.int32), size), axis=-1)
    return jnp.minimum(index, size - 1), peak


def most_likely(logits: jax.Array, vocab_size: int) -> jax.Array:
    """i32[R]: the tokens of rows f32[R, V] of raw logits that use no `Feature`, see `Sampled`."""
    tokens, peak = argmax(logits, vocab_size)
    return jnp.where(jnp.isfinite(peak), tokens, NOT_FINITE)


def draw(logits: jax.Array, key: Words, limits: Limits) -> jax.Array:
    """The token of the largest scaled logit plus noise among those that the limits keep.

    The kept tokens are not looked for: the best of all is taken if it is one of them, which is one sum. If not, then
    whatever comes after it is not kept either, and the best of the rest is tried. With top_p = 0.9 that is needed once
    in ten times, and each time what is left shrinks to a half on average.

    Args:
      logits: f32[V]; if their peak is not finite, any token is drawn.
    """
    needed = needed_mass(logits, limits)
    noisy = limits.scaled(logits) + gumbel(key, len(logits))
    noisy = jax.lax.optimization_barrier(noisy)  # else it is computed in each pass

    def check(token: jax.Array) -> tuple[jax.Array, jax.Array]:
        return token, exceeds(logits, token, limits, needed) & jnp.isfinite(limits.peak)

    def retry(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token, _ = state
        return check(argmax(jnp.where(comes_before(logits, token), noisy, -jnp.inf))[0])

    return jax.lax.while_loop(lambda state: state[1], retry, check(argmax(noisy)[0]))[0]
