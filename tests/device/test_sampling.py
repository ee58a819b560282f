"""Sampling, option by option, against plain NumPy on a small vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import NONE_ALLOWED, NOT_FINITE
from jaxpaged.device import sampling
from jaxpaged.device.draw import argmax
from tests.device.sampling_cases import (
    COLUMNS,
    HEAD,
    PROCESSORS,
    ROWS,
    VOCAB,
    Batch,
    NoGrammar,
    adjusted,
    kept,
    log_softmax,
    make_request,
    random_logits,
    sample_rows,
)


def token_of(logits, params: SamplingParams | None = None, **fields) -> int:
    return int(sample_rows(logits, make_request(params, **fields)).tokens[0])


def greedy(**params) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=99, **params)


def tokens_of(logits, count: int = 40, **params) -> set[int]:
    """Tokens that so many seeds give."""
    tokens: set[int] = set()
    for first in range(0, count, ROWS):
        requests = [make_request(SamplingParams(**params), seed=first + i) for i in range(ROWS)]
        tokens.update(sample_rows(logits, *requests).tokens.tolist())
    return tokens


def test_greedy_takes_the_lowest_id_of_equals():
    logits = np.zeros(HEAD)
    logits[[8, 30]] = 5
    assert token_of(logits) == token_of(logits, greedy(logprobs=1)) == 8
    index, peak = argmax(jnp.asarray(logits)[None])
    assert (index[0], peak[0]) == (8, 5)


@pytest.mark.parametrize("width", [7, 32, 1056, 1536])  # no block, one, and several of two sizes
def test_argmax_is_numpys_whatever_the_blocks(width):
    rng = np.random.default_rng(width)
    values = rng.integers(-3, 4, (64, width)).astype(np.float32)  # many equals
    values[0], values[1] = -np.inf, -5
    values[1, -1] = 9
    for size in (width, width - 1, (width + 1) // 2):
        index, peak = argmax(jnp.asarray(values), size)
        np.testing.assert_array_equal(index, values[:, :size].argmax(-1))
        np.testing.assert_array_equal(peak, values[:, :size].max(-1))
    values[2] = np.nan  # as a model's are; XLA:CPU may overlook a single one
    index, peak = argmax(jnp.asarray(values))
    assert not np.isfinite(peak[2]) and 0 <= index[2] < width and np.isfinite(peak[3])


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_tiny_temperature_is_greedy(temperature, dtype):
    """B29."""
    logits = np.asarray(jnp.asarray(np.linspace(60, -60, HEAD), dtype), np.float32)
    assert token_of(logits, SamplingParams(temperature=temperature)) == 0


def test_small_temperature_is_finite_and_nearly_greedy():
    """B29."""
    assert tokens_of(np.linspace(60, -60, HEAD), temperature=0.01) == {0}


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"top_p": 1e-50}, {"min_p": 1.0}])
def test_edges_that_mean_greedy(params):
    """B30."""
    logits = random_logits()
    assert tokens_of(logits, **params) == {int(logits[:VOCAB].argmax())}


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, HEAD, HEAD + 5, 2**31 - 1])
def test_top_k_off(top_k):
    """B30."""
    logits = random_logits()
    for top_p in (1.0, 0.9):
        one, other = (SamplingParams(top_k=k, top_p=top_p) for k in (top_k, 0))
        assert token_of(logits, one) == token_of(logits, other)


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_equals():
    logits = np.zeros(HEAD)
    logits[[40, 41]] = 1.0
    assert tokens_of(logits, 200, top_k=4) == {40, 41, 0, 1}


def test_top_p_keeps_the_smallest_sufficient_set():
    probs = np.full(HEAD, 1e-6)
    probs[[10, 11, 12, 13]] = [0.4, 0.3, 0.2, 0.1]
    logits = np.log(probs)
    assert tokens_of(logits, 100, top_p=0.6) == {10, 11}
    assert tokens_of(logits, 100, top_p=0.75) == {10, 11, 12}
    assert tokens_of(logits, 20, top_p=0.6, top_k=1) == {10}
    assert tokens_of(logits, 100, top_p=0.6, top_k=2) == {10, 11}, "0.4 is 0.57 of what top-k keeps"
    assert tokens_of(logits, 100, top_p=0.55, top_k=2) == {10}


def test_min_p_is_relative_to_the_best():
    probs = np.full(HEAD, 1e-6)
    probs[[10, 11, 12, 13]] = [0.4, 0.3, 0.2, 0.1]
    assert tokens_of(np.log(probs), 100, min_p=0.4) == {10, 11, 12}


def test_seed_sample_and_position_alone_decide():
    """B31: neither neighbours nor the slot nor the row."""
    logits = random_logits()
    params = SamplingParams(temperature=0.8)
    request = make_request(params, seed=42)
    alone = int(sample_rows(logits, request).tokens[0])
    others = [
        make_request(SamplingParams(temperature=1.3, top_p=0.5, min_p=0.1, top_k=9), seed=1),
        make_request(greedy(presence_penalty=1, logprobs=5, logprobs_mode="processed_logprobs"), output=[3, 4]),
        make_request(greedy(allowed_token_ids=[3], min_tokens=3, logits_processors={"nan": {}})),
    ]
    for place in range(ROWS):
        batch = [*others[:place], request, *others[place:]]
        assert sample_rows(logits, *batch).tokens[place] == alone
    batch = Batch()
    batch.admit(2, request)
    assert batch.sample(logits, [ROWS, ROWS, ROWS, 2]).tokens[3] == alone
    for changed in ("seed", "index", "position"):
        spread = {
            token_of(
                logits,
                params,
                seed=i if changed == "seed" else 42,
                index=i if changed == "index" else 0,
                output=[5] * (i if changed == "position" else 0),
            )
            for i in range(20)
        }
        assert len(spread) > 3, changed
    high, low = (token_of(np.zeros(HEAD), SamplingParams(), seed=seed) for seed in (5 + (1 << 40), 5))
    assert high != low, "the upper half of the seed is lost"


def test_the_draw_is_the_best_of_the_kept_with_the_noise_of_jax_random():
    logits, vocab = random_logits(4, 2.0), slice(0, VOCAB)
    for seed in range(12):
        params = SamplingParams(temperature=0.7, top_p=0.8, top_k=seed * 4, min_p=0.001 * (seed % 3))
        request = make_request(params, seed=seed)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), request.num_tokens)
        noise = np.asarray(jax.random.gumbel(key, (HEAD,)))[vocab]
        ids = kept(logits[vocab], params)
        scaled = (logits[vocab] - logits[vocab].max()) / np.float32(0.7)
        assert token_of(logits, params, seed=seed) == ids[int((scaled + noise)[ids].argmax())]


def test_min_tokens_bans_every_stop_id():
    logits = np.zeros(HEAD)
    logits[[1, 2, 9, 4]] = [5, 4, 3, 1]
    params = greedy(min_tokens=3, stop_token_ids=[9, 189])
    for length, expected in [(0, 4), (2, 4), (3, 1)]:
        assert token_of(logits, params, output=[6] * length) == expected
    last = np.zeros(HEAD)
    last[VOCAB - 1] = 1  # a row without stop ids must not lose the last id of the vocabulary
    assert token_of(last, greedy(min_tokens=3, ignore_eos=True)) == VOCAB - 1


def test_vocabulary_padding_is_never_produced():
    logits = np.zeros(HEAD)
    logits[VOCAB:] = 9
    assert token_of(logits) == token_of(logits, greedy(logprobs=1)) == 0
    assert max(tokens_of(logits)) < VOCAB
    top = sample_rows(logits, make_request(greedy(logprobs=1)))
    assert top.top_logprobs[0, 0] == pytest.approx(-np.log(VOCAB), abs=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "params",
    [
        greedy(),
        SamplingParams(),
        SamplingParams(top_p=0.5, top_k=3, logprobs=2),
        greedy(logit_bias={7: 1.0}),
        SamplingParams(allowed_token_ids=[3, 4]),
    ],
    ids=str,
)
def test_nan_is_reported_in_its_row_only(bad, params):
    logits = np.stack([random_logits(i) for i in range(ROWS)])
    requests = [make_request(params, seed=i) for i in range(ROWS)]
    expected = sample_rows(logits, *requests).tokens.tolist()
    logits[1, 3] = bad
    expected[1] = NOT_FINITE
    assert sample_rows(logits, *requests).tokens.tolist() == expected


def test_a_row_that_may_produce_nothing_says_so():
    logits = random_logits()
    nothing = make_request(greedy(allowed_token_ids=[5]), bad_word_ids=[[5]])
    random = make_request(SamplingParams(allowed_token_ids=[5], top_p=0.5), bad_word_ids=[[5]])
    fine = make_request(greedy(allowed_token_ids=[5]))
    requests = [nothing, random, fine, make_request(greedy(logits_processors={"nan": {}}))]
    assert sample_rows(logits, *requests).tokens.tolist() == [NONE_ALLOWED, NONE_ALLOWED, 5, NONE_ALLOWED]
    assert sample_rows(logits * np.nan, *requests, make_request()).tokens.tolist() == [NOT_FINITE] * ROWS


def test_allowed_ids_and_grammar_masks():
    logits = random_logits()
    masks = np.zeros((ROWS, -(-HEAD // 32)), np.int32)
    masks[:, 1] = -1  # 32 to 63
    masks[:, 3] = np.int32(-(2**31))  # 127
    by_mask, both = {*range(32, 64), 127}, [40, 41, 127, 150]
    grammar = make_request(greedy(), grammar=NoGrammar())
    narrow = make_request(greedy(allowed_token_ids=both), grammar=NoGrammar())
    allowed, plain = make_request(greedy(allowed_token_ids=both)), make_request()
    requests = (grammar, narrow, allowed, plain)
    expected = [int(adjusted(logits, r, by_mask if r.grammar else None).argmax()) for r in requests]
    assert sample_rows(logits, *requests, masks=masks).tokens.tolist() == expected


def test_bad_words_end_where_the_output_ends_like_them():
    logits = np.zeros(HEAD)
    logits[[9, 8, 6]] = [3, 2, 1]
    words = [[9], [4, 5, 8], [5, 6]]
    for prompt, output, expected in [
        ([1], [], 8),  # one token: always banned
        ([1], [4, 5], 0),  # both end now
        ([1, 4], [5], 8),  # the prompt does not count
        ([1], [4, 4, 5], 0),
        ([1], [4, 5, 5], 8),
        ([4, 5], [], 8),
        ([1], [5, 4], 8),
    ]:
        assert token_of(logits, greedy(), prompt=prompt, output=output, bad_word_ids=words) == expected, output


def test_logit_bias_is_added():
    logits = random_logits()
    params = greedy(logit_bias={150: 20.0, 3: -5.0, 189: 19.0})
    assert token_of(logits, params) == adjusted(logits, make_request(params)).argmax()
    assert token_of(logits, greedy(logit_bias={150: -100.0, 7: 100.0})) == 7


def random_request(generator: np.random.Generator):
    """A greedy request with a random choice of everything that comes before the temperature, and its logprobs."""

    def some(count: int) -> list[int]:
        return generator.integers(0, VOCAB, count).tolist()

    def maybe(value):
        return value if generator.random() < 0.5 else None

    params = greedy(
        logprobs=COLUMNS,
        logprobs_mode="processed_logprobs",
        allowed_token_ids=maybe([9, *some(150)]),
        min_tokens=int(generator.integers(0, 9)),
        stop_token_ids=some(5),
        logit_bias=maybe({t: float(generator.normal()) for t in some(30)}),
        presence_penalty=maybe(1.5) or 0.0,
        frequency_penalty=maybe(-0.5) or 0.0,
        repetition_penalty=maybe(1.2) or 1.0,
    )
    output = some(int(generator.integers(0, 12)))
    words = [some(1), output[-1:] + some(1), output[-2:] + some(1), [3, *some(2)]]
    return make_request(params, prompt=some(20), output=output, bad_word_ids=words if generator.random() < 0.5 else [])


@pytest.mark.parametrize("seed", range(12))
def test_everything_before_the_temperature_together(seed):
    """The processed log-probabilities tell the whole distribution."""
    generator = np.random.default_rng(seed)
    requests = [random_request(generator) for _ in range(ROWS)]
    logits = generator.normal(size=(ROWS, HEAD)).astype(np.float32) * 3
    result = sample_rows(logits, *requests)
    for row, request in enumerate(requests):
        expected = adjusted(logits[row], request)
        assert result.tokens[row] == expected.argmax()
        expected = log_softmax(expected)
        np.testing.assert_allclose(
            result.top_logprobs[row], np.sort(expected)[::-1][:COLUMNS], rtol=1e-5, atol=1e-5, err_msg=str(request)
        )
        live = np.isfinite(np.asarray(result.top_logprobs[row]))
        np.testing.assert_allclose(
            expected[np.asarray(result.top_ids[row])[live]], np.asarray(result.top_logprobs[row])[live], atol=1e-4
        )


def test_features_never_leak_to_neighbours_or_to_the_next_in_the_slot():
    logits = random_logits(5)
    generator = np.random.default_rng(5)
    plain = make_request(seed=3)
    drawn = make_request(SamplingParams(temperature=0.9), seed=3)
    expected = [int(sample_rows(logits, request).tokens[0]) for request in (plain, drawn)]
    batch = Batch()
    for slot in range(ROWS):
        batch.admit(slot, random_request(generator))
    before = batch.sample(logits)
    batch.admit(1, plain)
    batch.admit(2, drawn)
    after = batch.sample(logits)
    assert after.tokens[1:3].tolist() == expected
    assert after.logprobs[1:3].tolist() == [0, 0] and not after.top_ids[1:3].any()
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[[0, 3]], np.asarray(y)[[0, 3]])


def test_side_by_side_as_one_after_the_other(monkeypatch):
    """What accelerators compile: all rows at once, branching on what any of them wants."""
    generator = np.random.default_rng(8)
    draws = {"temperature": 0.9, "top_p": 0.8, "logprobs": 4}
    batches = [
        [random_request(generator) for _ in range(ROWS)],
        [
            make_request(SamplingParams(**draws), seed=3),
            make_request(SamplingParams(**draws, top_k=9, logprobs_mode="processed_logprobs"), seed=4),
            make_request(greedy(logprobs=1, logprob_token_ids=[5, 3], logits_processors={"avoid_last": {}})),
            make_request(),
        ],
        [make_request(SamplingParams(temperature=2.0, min_p=0.2), seed=5), make_request(greedy(presence_penalty=2))],
    ]
    logits = generator.normal(size=(ROWS, HEAD)).astype(np.float32) * 3
    expected = [sample_rows(logits, *requests) for requests in batches]

    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    program = jax.jit(
        lambda *args: sampling.sample(*args, vocab_size=VOCAB, max_logprobs=COLUMNS, processors=PROCESSORS)
    )
    monkeypatch.setattr("tests.device.sampling_cases.jit_sample", program)
    for requests, result in zip(batches, expected, strict=True):
        for x, y in zip(sample_rows(logits, *requests), result, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
