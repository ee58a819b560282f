"""Sampling against plain numpy, on small vocabularies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import Admission
from jaxpaged.device.options import empty_options, mask_words
from jaxpaged.device.sampling import Sampled, argmax, sample
from jaxpaged.device.slots import Feature, admit, empty_slots, pack_admission

VOCAB, ROWS, MAX_LEN, PAGES = 50, 4, 32, 4
OPTIONS, MASKS = empty_options(ROWS, VOCAB), jnp.full((ROWS, mask_words(VOCAB)), -1, jnp.int32)
jit_admit = jax.jit(admit)
jit_sample = jax.jit(sample, static_argnames=("vocab_size", "max_logprobs"))


def slots_for(*params: SamplingParams, prompt_len: int = 5, eos=(1, 2), seed: int = 7):
    slots = empty_slots(ROWS, MAX_LEN, PAGES)
    for slot, p in enumerate(params):
        request = Request(str(slot), list(range(prompt_len)), p, max_model_len=MAX_LEN, eos_token_ids=eos, seed=seed)
        slots = jit_admit(slots, pack_admission(Admission(slot, request, [3, 1]), MAX_LEN, PAGES))
    return slots


def draw(logits, *params: SamplingParams, position: int = 5, vocab_size: int = VOCAB, rows=None, **options) -> Sampled:
    """Samples row i of `logits` with params[i]; the rows beyond are greedy padding."""
    params += (SamplingParams(temperature=0),) * (ROWS - len(params))
    logits = np.resize(np.asarray(logits, np.float32), (ROWS, VOCAB))
    rows = np.arange(ROWS) if rows is None else rows
    positions = np.broadcast_to(np.asarray(position), ROWS)
    slots = slots_for(*params, **options)
    return jit_sample(
        logits, slots, OPTIONS, jnp.asarray(rows), jnp.asarray(positions), MASKS, vocab_size=vocab_size, max_logprobs=5
    )


def many(logits, params: SamplingParams, count: int = 600) -> np.ndarray:
    """Tokens drawn at `count` positions with one seed."""
    slots = slots_for(*[params] * ROWS)
    logits = np.broadcast_to(np.asarray(logits, np.float32), (ROWS, VOCAB))
    tokens = [
        jit_sample(
            logits,
            slots,
            OPTIONS,
            jnp.arange(ROWS),
            jnp.arange(i, i + ROWS),
            MASKS,
            vocab_size=VOCAB,
            max_logprobs=5,
        ).tokens
        for i in range(10, 10 + count, ROWS)
    ]
    return np.concatenate(tokens)


def some_logits(seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * scale


def test_admission_reaches_its_slot_whole():
    params = SamplingParams(
        temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, seed=-1, min_tokens=2, stop_token_ids=[9], logprobs=1
    )
    slots = slots_for(params)
    assert slots.history[0, :5].tolist() == [0, 1, 2, 3, 4]
    assert slots.block_table[0].tolist() == [3, 1, 0, 0]
    rows = jnp.array([0])
    expected = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "top_k": 3, "min_total_tokens": 7}
    expected |= {"seed_high": -1, "seed_low": -1, "num_prompt_tokens": 5, "sample_index": 0}
    expected |= {"features": 1 << 3 | int(Feature.RANDOM | Feature.TOP_K | Feature.TOP_P | Feature.LOGPROBS)}
    for name, value in expected.items():
        assert slots.column(name, rows)[0] == pytest.approx(value), name
    assert slots.stop_ids[0, :3].tolist() == [1, 2, 9]
    assert slots.history[1].tolist() == [0] * MAX_LEN


def test_greedy_takes_the_lowest_id_of_equals():
    logits = np.zeros(VOCAB)
    logits[[8, 30]] = 5
    assert draw(logits, SamplingParams(temperature=0)).tokens[0] == 8
    index, peak = argmax(jnp.asarray(logits)[None])
    assert (index[0], peak[0]) == (8, 5)


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_tiny_temperature_is_greedy(temperature, dtype):
    logits = np.asarray(jnp.asarray(np.linspace(-60, 60, VOCAB), dtype), np.float32)
    assert draw(logits, SamplingParams(temperature=temperature)).tokens[0] == VOCAB - 1


def test_small_temperature_is_finite_and_nearly_greedy():
    assert set(many(np.linspace(-60, 60, VOCAB), SamplingParams(temperature=0.01), 40)) == {VOCAB - 1}


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"top_p": 1e-50}, {"min_p": 1.0}])
def test_edges_that_mean_greedy(params):
    logits = some_logits()
    assert set(many(logits, SamplingParams(**params), 40)) == {int(logits.argmax())}


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 5])
def test_top_k_off(top_k):
    logits = some_logits()
    np.testing.assert_array_equal(
        many(logits, SamplingParams(top_k=top_k, seed=3), 40), many(logits, SamplingParams(seed=3), 40)
    )


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_equals():
    logits = np.zeros(VOCAB)
    logits[[40, 41]] = 1.0
    assert set(many(logits, SamplingParams(top_k=4))) == {40, 41, 0, 1}


def test_top_p_keeps_the_smallest_sufficient_set():
    probs = np.full(VOCAB, 1e-6)
    probs[[10, 11, 12, 13]] = [0.4, 0.3, 0.2, 0.1]
    logits = np.log(probs)
    assert set(many(logits, SamplingParams(top_p=0.6))) == {10, 11}
    assert set(many(logits, SamplingParams(top_p=0.75))) == {10, 11, 12}
    assert set(many(logits, SamplingParams(top_p=0.6, top_k=1))) == {10}


def test_min_p_is_relative_to_the_best():
    probs = np.full(VOCAB, 1e-6)
    probs[[10, 11, 12, 13]] = [0.4, 0.3, 0.2, 0.1]
    assert set(many(np.log(probs), SamplingParams(min_p=0.4))) == {10, 11, 12}


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.9}],
    ids=str,
)
def test_distribution(params):
    """Chi-square against the exact distribution; the seed is fixed, so that the outcome is too."""
    logits = some_logits(1, 1.5)
    params = SamplingParams(seed=11, **params)
    exact = exact_distribution(logits, params)
    count = 4000
    tokens = many(logits, params, count)
    observed = np.bincount(tokens, minlength=VOCAB)
    assert observed[exact == 0].sum() == 0
    keep = exact * count >= 5
    chi2 = ((observed[keep] - exact[keep] * count) ** 2 / (exact[keep] * count)).sum()
    degrees = keep.sum() - 1
    assert chi2 < degrees + 4 * np.sqrt(2 * degrees)


def exact_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The processed distribution, by sorting."""
    probs = np.exp((logits - logits.max()) / params.temperature)
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    order = np.argsort(-probs, kind="stable")
    if params.top_k > 0:
        probs[order[params.top_k :]] = 0
    probs /= probs.sum()
    mass_before = np.cumsum(probs[order]) - probs[order]
    probs[order[mass_before >= params.top_p]] = 0
    return probs / probs.sum()


def test_seed_and_position_alone_decide():
    logits = some_logits()
    a = SamplingParams(seed=42, temperature=0.8)
    other = SamplingParams(temperature=1.3, top_p=0.5, seed=1)
    alone = draw(logits, a).tokens[0]
    assert draw(logits, other, a, other).tokens[1] == alone
    assert draw(logits, a, rows=np.array([3, 3, 0, 3])).tokens[2] == alone
    spread = {int(draw(logits, SamplingParams(seed=s)).tokens[0]) for s in range(20)}
    assert len(spread) > 3
    assert len({int(draw(logits, a, position=p).tokens[0]) for p in range(5, 25)}) > 3
    high = draw(np.zeros(VOCAB), SamplingParams(seed=5 + (1 << 40)), SamplingParams(seed=5)).tokens
    assert high[0] != high[1], "the upper half of the seed is lost"


def test_min_tokens_bans_every_stop_id():
    logits = np.zeros(VOCAB)
    logits[[1, 2, 9, 4]] = [5, 4, 3, 1]
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[9, 49])
    for position, expected in [(5, 4), (7, 4), (8, 1)]:
        assert draw(logits, params, position=position).tokens[0] == expected
    last = np.zeros(VOCAB)
    last[VOCAB - 1] = 1  # a row without stop ids must not lose the last id of the vocabulary
    plain = SamplingParams(temperature=0, min_tokens=3, ignore_eos=True)
    assert draw(last, plain).tokens[0] == VOCAB - 1


def test_vocabulary_padding_is_never_produced():
    logits = np.zeros(VOCAB)
    logits[45:] = 9
    assert draw(logits, SamplingParams(temperature=0), vocab_size=45).tokens[0] == 0


def test_nan_is_reported_in_its_row_only():
    logits = np.zeros((ROWS, VOCAB))
    logits[0, 3] = np.nan
    logits[1, 7] = 1
    assert draw(logits, SamplingParams(temperature=0), SamplingParams(temperature=0)).tokens[:2].tolist() == [-1, 7]


def test_logprobs_are_raw_and_ranked():
    logits = some_logits()
    params = SamplingParams(temperature=2.0, top_k=2, logprobs=3, seed=5)
    result = draw(logits, params)
    expected = logits - np.log(np.exp(logits).sum())
    token = int(result.tokens[0])
    assert result.logprobs[0] == pytest.approx(expected[token], abs=1e-5)
    assert result.ranks[0] == 1 + (expected > expected[token]).sum()
    order = np.argsort(-expected, kind="stable")[:5]
    assert result.top_ids[0].tolist() == order.tolist()
    np.testing.assert_allclose(result.top_logprobs[0], expected[order], atol=1e-5)
    assert draw(logits, SamplingParams(seed=5)).logprobs.tolist() == [0.0] * ROWS
