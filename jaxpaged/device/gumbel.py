"""Gumbel noise from counters: any element of it alone, with the values of `jax.random`.

`jax.random.gumbel` goes through rolled loops over whole arrays on CPU. Here a draw is one expression, which XLA fuses.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA

Words = tuple[jax.Array, jax.Array]


def request_key(seed_high: jax.Array, seed_low: jax.Array, sample_index: jax.Array, position: jax.Array) -> Words:
    """`fold_in(fold_in(key(seed), sample_index), position)` as its two words: never from the batch."""
    seed = seed_high.astype(jnp.uint32), seed_low.astype(jnp.uint32)
    return _fold_in(_fold_in(seed, sample_index), position)


def gumbel(key: Words, size: int) -> jax.Array:
    """f32[size], equal to `jax.random.gumbel(key, (size,))`."""
    counter = jnp.arange(size, dtype=jnp.uint32)
    high, low = _threefry(key, jnp.zeros_like(counter), counter)
    # 23 random bits below an exponent of 0 are a number in [1, 2).
    unit = jax.lax.bitcast_convert_type(((high ^ low) >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1
    tiny = jnp.finfo(jnp.float32).tiny
    return -jnp.log(-jnp.log(jnp.maximum(unit * (1 - tiny) + tiny, tiny)))


def _fold_in(key: Words, data: jax.Array) -> Words:
    return _threefry(key, jnp.zeros_like(data, jnp.uint32), data.astype(jnp.uint32))


def _threefry(key: Words, high: jax.Array, low: jax.Array) -> Words:
    """Threefry-2x32 with 20 rounds."""
    keys = *key, key[0] ^ key[1] ^ jnp.uint32(_PARITY)
    high, low = high + keys[0], low + keys[1]
    for i in range(5):
        for distance in _ROTATIONS[i % 2]:
            high = high + low
            low = high ^ ((low << distance) | (low >> (32 - distance)))
        high, low = high + keys[(i + 1) % 3], low + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return high, low
