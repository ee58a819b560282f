"""Log-probabilities and ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.device.logprobs import token_logprobs, top_k
from tests.device.sampling_cases import COLUMNS, HEAD, VOCAB, adjusted, kept, log_softmax, make_request, sample_rows
from tests.device.sampling_cases import random_logits as some_logits


def raw_logprobs(logits) -> np.ndarray:
    x = np.array(logits)
    x[VOCAB:] = -np.inf
    return log_softmax(x)


def test_raw_ones_are_of_the_model_whatever_is_sampled_from():
    logits = some_logits()
    params = SamplingParams(
        temperature=2.0, top_k=2, logprobs=3, seed=5, logit_bias={4: 50.0}, allowed_token_ids=[4, 9, 8]
    )
    result = sample_rows(logits, make_request(params))
    expected, token = raw_logprobs(logits), int(result.tokens[0])
    assert token in (4, 8, 9)
    assert result.logprobs[0] == pytest.approx(expected[token], abs=1e-5)
    assert result.ranks[0] == 1 + (expected > expected[token]).sum()
    order = np.argsort(-expected, kind="stable")[:COLUMNS]
    assert result.top_ids[0].tolist() == order.tolist()
    np.testing.assert_allclose(result.top_logprobs[0], expected[order], atol=1e-5)
    assert result.top_ranks[0].tolist() == list(range(1, COLUMNS + 1))


def test_who_wants_none_gets_zeros():
    plain, other = make_request(SamplingParams(seed=5)), make_request(SamplingParams(seed=5, logprobs=1))
    result = sample_rows(some_logits(), plain, other)
    for x in result[1:]:
        assert not np.asarray(x)[0].any() and np.asarray(x)[1].any()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 20},
        {"top_p": 0.6},
        {"top_k": 140, "top_p": 0.9, "min_p": 0.001},
        {"top_k": 12, "top_p": 0.7, "presence_penalty": 1.0, "logit_bias": {3: 2.0}},
    ],
    ids=str,
)
def test_processed_ones_are_of_what_is_sampled_from(options):
    params, logits = SamplingParams(logprobs=5, logprobs_mode="processed_logprobs", **options), some_logits(2, 1.5)
    request = make_request(params, output=[3, 4, 3])
    result, before = sample_rows(logits, request), adjusted(logits, request)
    ids = kept(before, params)[:COLUMNS]
    expected = np.full(HEAD, -np.inf)
    expected[kept(before, params)] = log_softmax(before[kept(before, params)] / np.float32(params.temperature))
    assert result.top_ids[0, : len(ids)].tolist() == ids
    np.testing.assert_allclose(result.top_logprobs[0, : len(ids)], expected[ids], atol=2e-5)
    assert np.isneginf(result.top_logprobs[0, len(ids) :]).all()
    token = int(result.tokens[0])
    assert result.logprobs[0] == pytest.approx(expected[token], abs=2e-5)
    assert result.ranks[0] == 1 + ids.index(token)
    same = SamplingParams(logprobs=5, **options)
    assert sample_rows(logits, make_request(same, output=[3, 4, 3])).tokens[0] == token, "telling changes nothing"


def test_those_of_given_tokens_come_in_their_order_with_ranks():
    logits, ids = some_logits(3), [150, 3, 3, 0, 189]
    params = SamplingParams(temperature=0, logprobs=1, logprob_token_ids=ids)
    neighbour = make_request(SamplingParams(temperature=0, logprobs=1))
    result, expected = sample_rows(logits, make_request(params), neighbour), raw_logprobs(logits)
    assert result.top_ids[0, :5].tolist() == ids
    np.testing.assert_allclose(result.top_logprobs[0, :5], expected[ids], atol=1e-5)
    assert result.top_ranks[0, :5].tolist() == [1 + int((expected > expected[i]).sum()) for i in ids]
    assert np.isneginf(result.top_logprobs[0, 5:]).all() and not result.top_ids[0, 5:].any()
    assert result.logprobs[0] == pytest.approx(expected.max(), abs=1e-5) and result.ranks[0] == 1
    assert result.top_ids[1].tolist() == np.argsort(-expected, kind="stable")[:COLUMNS].tolist()


def test_those_of_given_tokens_can_be_processed():
    params = SamplingParams(
        top_k=3, logprobs=1, logprob_token_ids=list(range(128)), logprobs_mode="processed_logprobs", logit_bias={7: 9.0}
    )
    request, logits = make_request(params), some_logits(3)
    result, ids = sample_rows(logits, request), kept(adjusted(logits, request), params)
    told = np.flatnonzero(np.isfinite(result.top_logprobs[0, :128])).tolist()
    assert set(told) == {i for i in ids if i < 128} >= {7}
    assert result.top_ranks[0, 7] == 1 + ids.index(7)


def test_of_given_positions_of_a_prompt():
    logits = np.stack([some_logits(i) for i in range(6)])
    tokens = np.array([5, 0, 189, 70, 3, 3], np.int32)
    result = jax.jit(lambda x, t: token_logprobs(x, t, vocab_size=VOCAB, columns=HEAD))(logits, jnp.asarray(tokens))
    for row, token in enumerate(tokens):
        expected = raw_logprobs(logits[row])
        assert result.logprob[row] == pytest.approx(expected[token], abs=1e-5)
        assert result.rank[row] == 1 + (expected > expected[token]).sum()
        order = np.argsort(-expected, kind="stable")
        assert result.top_ids[row, :VOCAB].tolist() == order[:VOCAB].tolist()
        np.testing.assert_allclose(result.top_logprobs[row], expected[order], atol=1e-5)


def test_equals_share_a_rank_and_more_columns_than_tokens_are_empty():
    logits = jnp.zeros((1, 4)).at[0, 2].set(1)
    result = token_logprobs(logits, jnp.array([3]), vocab_size=4, columns=6)
    assert result.rank[0] == 2
    assert result.top_ids[0].tolist() == [2, 0, 1, 3, 0, 0]
    assert np.isneginf(result.top_logprobs[0, 4:]).all()


def test_the_most_likely_ones_are_not_looked_for_if_none_is_asked_for():
    """Neither with none asked for nor with given ids; a neighbour that wants them changes nothing."""
    logits = some_logits(4)
    none, ids = (
        SamplingParams(temperature=0, **o) for o in ({"logprobs": 0}, {"logprobs": 1, "logprob_token_ids": [5]})
    )
    for params in (none, ids):
        alone = sample_rows(logits, make_request(params))
        beside = sample_rows(logits, make_request(params), make_request(SamplingParams(temperature=0, logprobs=2)))
        for one, two in zip(alone, beside, strict=True):
            np.testing.assert_array_equal(one[0], two[0])
        assert alone.ranks[0] == 1 and alone.logprobs[0] == pytest.approx(raw_logprobs(logits).max(), abs=1e-5)
    assert not sample_rows(logits, make_request(none)).top_ids[0].any()


def test_zeros_of_either_sign_are_equals():
    logits = jnp.array([[-1.0, -0.0, 0.0, -0.0]])
    result = token_logprobs(logits, jnp.array([1]), vocab_size=4, columns=4)
    assert result.top_ids[0].tolist() == [1, 2, 3, 0] and result.rank[0] == 1


@pytest.mark.parametrize("size, count", [(1024, 1), (1024, 7), (1056, 9), (1024, 900), (200, 20)])
def test_the_largest_are_found_in_the_blocks_with_the_largest_maxima(size, count):
    """Blocks of 64 and of 32, and none where they would be nearly all; equals by index, whatever their block."""
    generator = np.random.default_rng(size + count)
    values = generator.integers(-3, 4, (8, size)).astype(np.float32)
    values[1], values[2, 70:] = -np.inf, -np.inf
    values[3] = generator.choice(np.array([0.0, -0.0, -1.0], np.float32), size)
    values[4] = np.sort(values[4])
    best, ids = jax.jit(jax.vmap(lambda row: top_k(row, count)))(values)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(best, np.take_along_axis(values, order, -1))
