"""The noise and its keys are those of `jax.random`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.device.gumbel import gumbel, request_key


@pytest.mark.parametrize(("seed", "index", "position"), [(0, 0, 0), (7, 0, 5), (2**40 + 3, 2, 100_000), (-1, 127, 9)])
def test_noise_equals_jax_random(seed, index, position):
    words = np.array([seed >> 32, seed], np.int64).astype(np.uint32)  # the low halves of each
    key = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, index), position)
    signed = words.view(np.int32)
    own = request_key(*(jnp.asarray(x) for x in (signed[0], signed[1], np.int32(index), np.int32(position))))
    assert [int(word) for word in own] == jax.random.key_data(key).tolist()
    np.testing.assert_array_equal(gumbel(own, 1000), jax.random.gumbel(key, (1000,)))


def test_an_element_does_not_depend_on_how_many_there_are():
    key = request_key(*(jnp.int32(i) for i in (1, 2, 3, 4)))
    np.testing.assert_array_equal(gumbel(key, 10), gumbel(key, 1000)[:10])
