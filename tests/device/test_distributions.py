"""Thousands of draws against exact distributions, by chi-square; seeds are fixed, so that the outcome is too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import Admission
from jaxpaged.device.options import empty_options, mask_words
from jaxpaged.device.sampling import sample
from jaxpaged.device.slots import Slots, admit, empty_slots, features, pack_admission
from tests.device.sampling_cases import HEAD, MAX_LEN, PAGES, VOCAB, adjusted, distribution, make_request, sample_rows

DRAWS = 4000

jit_sample = jax.jit(lambda *args: sample(*args, vocab_size=VOCAB, max_logprobs=1).tokens)


def draws(logits: np.ndarray, params: SamplingParams, *, by_seed: bool = False, **fields) -> np.ndarray:
    """A token for each of `DRAWS` samples of one request, or of requests with seeds of their own."""
    request = make_request(params, **fields)
    packed = []
    for i in range(DRAWS):
        request.index, request.seed = (0, i) if by_seed else (i, 11)
        packed.append(pack_admission(Admission(0, request, []), features(request), MAX_LEN, PAGES))
    slots = jax.vmap(lambda one: admit(empty_slots(1, MAX_LEN, PAGES), one))(jnp.asarray(np.stack(packed)))
    slots = Slots(*(x[:, 0] for x in slots))
    masks = jnp.full((DRAWS, mask_words(HEAD)), -1, jnp.int32)
    rows = jnp.broadcast_to(jnp.asarray(logits), (DRAWS, HEAD))
    positions = jnp.full(DRAWS, request.num_tokens)
    # Nobody uses an option: that they have one row does not matter.
    return np.asarray(jit_sample(rows, slots, empty_options(0, HEAD), jnp.arange(DRAWS), positions, masks))


def p_value(tokens: np.ndarray, probs: np.ndarray) -> float:
    """Of the chi-square test; tokens that are expected less than five times are counted together."""
    observed, expected = np.bincount(tokens, minlength=len(probs)), probs * len(tokens)
    assert observed[expected == 0].sum() == 0, "a token that cannot be"
    rare = expected < 5
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (observed, expected))
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1] * observed[:-1].sum() / expected[:-1].sum()
    return float(stats.chisquare(observed, expected).pvalue) if len(observed) > 1 else 1.0


def some_logits() -> np.ndarray:
    return np.random.default_rng(1).normal(size=HEAD).astype(np.float32) * 2


OUTPUT = [3, 3, 3, 20, 21, 20, 150]
PENALTIES = {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.3}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_k": 8},
        {"top_p": 0.8},
        {"top_p": 0.15},
        {"min_p": 0.05},
        {"top_k": 20, "top_p": 0.9},
        {"top_k": 140, "top_p": 0.95, "min_p": 0.01, "temperature": 1.3},
        PENALTIES,
        {**PENALTIES, "top_p": 0.7, "temperature": 1.2},
        {"min_tokens": 20, "max_tokens": 30, "top_k": 40},
    ],
    ids=str,
)
def test_samples_of_one_seed_follow_the_distribution(params):
    params, logits = SamplingParams(**params), some_logits()
    logits[[1, 2]] = 5  # EOS is likely
    exact = distribution(adjusted(logits, make_request(params, output=OUTPUT)), params)
    assert p_value(draws(logits, params, output=OUTPUT), exact) > 1e-4


def test_seeds_follow_the_distribution():
    params, logits = SamplingParams(temperature=0.8, top_p=0.9), some_logits()
    exact = distribution(adjusted(logits, make_request(params)), params)
    assert p_value(draws(logits, params, by_seed=True), exact) > 1e-4


def test_the_number_of_rows_does_not_matter():
    params, logits = SamplingParams(temperature=1.2, top_p=0.9, presence_penalty=0.5), some_logits()
    tokens = draws(logits, params, output=OUTPUT)
    few = [make_request(params, output=OUTPUT, seed=11, index=i) for i in (0, 17, DRAWS - 1)]
    assert sample_rows(logits, *few).tokens[:3].tolist() == tokens[[0, 17, DRAWS - 1]].tolist()


def test_the_test_can_fail():
    params, logits = SamplingParams(temperature=1.1), some_logits()
    exact = distribution(adjusted(logits, make_request(params)), SamplingParams())
    assert p_value(draws(logits, params), exact) < 1e-4
