"""Sums of hidden states against dense attention, however the prompt is cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.step import PooledRange
from jaxpaged.device.hidden_rows import CHUNK
from jaxpaged.device.pooling import add
from jaxpaged.layers.attention import DenseContext
from jaxpaged.models.decoder import Decoder
from tests.device.by_hand import MAX_LEN, ROWS, make_request, make_step, prompt


def hidden(runner, token_ids: list[int]) -> np.ndarray:
    """Hidden states [T, D] after the final norm, from dense attention."""
    padded = np.zeros(MAX_LEN, np.int32)
    padded[: len(token_ids)] = token_ids
    return np.asarray(_dense(runner.module, runner.params, padded))[: len(token_ids)]


@partial(jax.jit, static_argnums=0)
def _dense(module: Decoder, params: Any, ids: jax.Array) -> jax.Array:
    return module.apply({"params": params}, ids, jnp.arange(len(ids)), DenseContext())[0]


def pooled(runner, rows, ranges, **options) -> list[np.ndarray]:
    return runner.collect(runner.launch(make_step(rows, pooled=ranges, **options))).pooled


@pytest.mark.parametrize(("first", "count"), [(0, CHUNK + 20), (CHUNK + 19, 1), (3, CHUNK), (7, 5)])
def test_parts_of_a_prompt_in_more_than_one_call(runner, first, count):
    ids = prompt(CHUNK + 20)
    request = make_request(runner, ids)
    (total,) = pooled(runner, [(request, 0, len(ids))], [PooledRange(0, first, count)])
    assert total.dtype == np.float32
    np.testing.assert_allclose(total, hidden(runner, ids)[first : first + count].sum(0), atol=1e-3)


def test_two_prompts_side_by_side_in_two_steps(runner):
    """The second step is one of a token a row."""
    a, b = prompt(31), prompt(40, seed=1)
    first, second = make_request(runner, a), make_request(runner, b)
    of_a, of_b = pooled(runner, [(first, 0, 30), (second, 0, 39)], [PooledRange(0, 0, 30), PooledRange(1, 9, 30)])
    rest = pooled(runner, [(first, 30, 1), (second, 39, 1)], [PooledRange(1, 39, 1)], admit=False)
    np.testing.assert_allclose(of_a, hidden(runner, a)[:30].sum(0), atol=1e-3)
    np.testing.assert_allclose(of_b + rest[0], hidden(runner, b)[9:].sum(0), atol=1e-3)


def test_a_neighbour_that_is_not_finite_keeps_it_to_itself(runner):
    """What is not asked for, padding and other rows, may be NaN."""
    fine = jnp.full((96, 64), jnp.nan).at[5:8].set(1.0)
    request, other = make_request(runner, prompt(8)), make_request(runner, prompt(20))
    step = make_step([(request, 0, 8), (other, 0, 20)], pooled=[PooledRange(0, 5, 3), PooledRange(1, 0, 20)])
    mine, theirs = runner._pooling.collect(step, runner._pooling.launch(fine, step))
    assert mine.tolist() == [3.0] * 64 and np.isnan(theirs).all()


def test_nobody_asks(runner):
    launched = runner.launch(make_step([(make_request(runner, prompt(5)), 0, 5)]))
    assert launched.pooled is None and runner.collect(launched).pooled == []


def test_sums_of_16_bit_states_are_in_float32():
    """In bfloat16 a sum of ones stops at 256."""
    sums = jnp.zeros((1, 4), jnp.float32)
    for _ in range(10):
        sums = add(sums, jnp.ones((CHUNK, 4), jnp.bfloat16), jnp.zeros(CHUNK, jnp.int32))
    assert sums.tolist() == [[10.0 * CHUNK] * 4]


def test_its_memory_is_counted(runner):
    results, temporaries = runner._pooling.step_bytes()
    assert results >= 2 * ROWS * 64 * 4 and temporaries >= ROWS * 64 * 4
