"""Penalties against a count by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.device.penalties import CHUNK, penalize
from tests.device.sampling_cases import HEAD, VOCAB, Batch, adjusted, log_softmax, make_request, random_logits

MAX_LEN = 2 * CHUNK + 44


@jax.jit
def run(logits, history, num_tokens, num_prompt_tokens, presence, frequency, repetition, limit):
    return penalize(
        logits,
        history[None],
        jnp.int32(0),
        num_tokens,
        num_prompt_tokens,
        presence=presence,
        frequency=frequency,
        repetition=repetition,
        limit=limit,
    )


def test_which_tokens_each_penalty_sees():
    """B33: prompt [7, 7], output [9]."""
    logits = np.zeros(HEAD, np.float32)
    logits[[7, 9, 3]] = [4.0, -2.0, 1.0]
    history = np.zeros(MAX_LEN, np.int32)
    history[:3] = [7, 7, 9]

    def of(length: int, presence=0.0, frequency=0.0, repetition=1.0):
        changed = np.asarray(run(logits, history, length, 2, presence, frequency, repetition, length))
        others = np.delete(np.arange(HEAD), [7, 9])
        np.testing.assert_array_equal(changed[others], logits[others])
        return changed[7], changed[9]

    assert of(3, repetition=2.0) == (2.0, -4.0), "once each, whatever the sign"
    assert of(3, presence=1.0) == (4.0, -3.0)
    assert of(3, frequency=0.5) == (4.0, -2.5)
    assert of(2, presence=1.0, frequency=1.0) == (4.0, -2.0), "no output yet"
    assert of(2, repetition=2.0) == (2.0, -2.0), "the first step sees the prompt"


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, MAX_LEN - 1, MAX_LEN])
@pytest.mark.parametrize("beyond", [0, 500])
def test_long_histories_in_chunks(length, beyond):
    """Whatever lies beyond the sequence, and however far is looked, only the sequence counts."""
    generator = np.random.default_rng(length)
    history, prompt = generator.integers(0, 40, MAX_LEN).astype(np.int32), length // 3
    logits = random_logits(length)
    output = np.bincount(history[prompt:length], minlength=HEAD)
    expected = np.array(logits)
    seen = list(set(history[:length].tolist()))
    expected[seen] = np.where(logits[seen] > 0, logits[seen] / np.float32(1.3), logits[seen] * np.float32(1.3))
    expected -= np.float32(0.7) * (output > 0) + np.float32(0.2) * output
    limit = min(length + beyond, MAX_LEN)
    changed = run(logits, history, length, prompt, 0.7, 0.2, 1.3, limit)
    np.testing.assert_allclose(changed, expected, rtol=1e-5, atol=1e-5)


def test_banned_tokens_stay_banned():
    logits = np.full(HEAD, -np.inf, np.float32)
    logits[3] = 1
    history = np.arange(MAX_LEN, dtype=np.int32) % HEAD
    changed = np.asarray(run(logits, history, 50, 5, -2.0, -2.0, 0.5, 50))
    assert changed[3] == 2 and np.isneginf(np.delete(changed, 3)).all()


def test_a_preempted_request_counts_as_before():
    """B34: its output is uploaded again with the prompt, and is output still; so it is for min_tokens."""
    params = SamplingParams(
        temperature=0, presence_penalty=2, min_tokens=20, max_tokens=50, logprobs=1, logprobs_mode="processed_logprobs"
    )
    output = [9, 1, 30, 9, 30, 30, 5, 6, 150, 9]
    logits = random_logits(3)
    logits[[1, 2]] = 20
    never, again = Batch(), Batch()
    never.admit(0, make_request(params))
    never.slots = never.slots._replace(
        history=never.slots.history.at[0, 3 : 3 + len(output)].set(jnp.asarray(output, jnp.int32))
    )
    never.positions[0] += len(output)
    again.admit(0, make_request(SamplingParams(temperature=0)))  # somebody else was in the new slot
    again.admit(2, make_request(params, output=output))
    a, b = never.sample(logits), again.sample(logits, [2, 2, 2, 2])
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x[0], y[0])
    expected = adjusted(logits, make_request(params, output=output))
    assert int(a.tokens[0]) == int(expected.argmax()) not in (1, 2)
    assert a.logprobs[0] == pytest.approx(log_softmax(expected[:VOCAB]).max(), abs=1e-5)
