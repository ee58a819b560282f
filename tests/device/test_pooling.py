"""Sums of hidden states against dense attention, however the prompt is cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.step import PooledRange
from jaxpaged.device.pooling import sum_up
from jaxpaged.layers.attention import DenseContext
from jaxpaged.models.decoder import Decoder
from pallas_kernels.deviceless import compile_for
from tests.compilers import needs_compilers
from tests.device.by_hand import MAX_LEN, ROWS, TOKENS, make_request, make_step, prompt

LONG = 84


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


@pytest.mark.parametrize(("first", "count"), [(0, LONG), (LONG - 1, 1), (3, 64), (7, 5)])
def test_parts_of_a_prompt(runner, first, count):
    ids = prompt(LONG)
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
    sums = sum_up(jnp.ones((640, 4), jnp.bfloat16), jnp.zeros(640, jnp.int32), 1)
    assert sums.tolist() == [[640.0] * 4]


def test_its_memory_is_counted(runner):
    results, temporaries = runner._pooling.step_bytes(TOKENS)
    assert results >= ROWS * 64 * 4 and temporaries >= 0


@needs_compilers
def test_on_a_gpu_it_is_two_launches_however_long_the_prompts():
    states = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    program = compile_for("h200", partial(sum_up, num_sums=256), states, jax.ShapeDtypeStruct((8192,), jnp.int32))
    assert len(program.launches) == 2 and not program.copies and not program.temporary_bytes
