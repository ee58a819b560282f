"""Log-probabilities of prompts against dense attention, however the prompt is cut."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpaged.core.step import PromptRange, TokenLogprobs
from jaxpaged.device.prompt_logprobs import CHUNK
from tests.device.by_hand import TOKENS, VOCAB, dense_logprobs, make_request, make_step, prompt


def check(records: list[TokenLogprobs], expected: np.ndarray, token_ids: list[int], k: int) -> None:
    """`records` are those of `token_ids`, given the log-probabilities before each of them."""
    assert [record.token_id for record in records] == token_ids
    for record, row in zip(records, expected, strict=True):
        assert record.logprob == pytest.approx(row[record.token_id], abs=1e-3)
        assert record.rank == 1 + np.sum(row > row[record.token_id])
        assert len(record.top_ids) == len(record.top_logprobs) == k and record.top_ranks is None
        np.testing.assert_allclose(record.top_logprobs, np.sort(row)[::-1][:k], atol=1e-3)
        np.testing.assert_allclose(row[record.top_ids], record.top_logprobs, atol=1e-3)


@pytest.mark.parametrize("k", [0, 3, -1])
def test_a_whole_prompt_in_more_than_one_call(runner, k):
    ids = prompt(CHUNK + 20)
    request = make_request(runner, ids, prompt_logprobs=k)
    step = make_step([(request, 0, len(ids))], prompt_ranges=[PromptRange(0, 1, len(ids) - 1)])
    (records,) = runner.collect(runner.launch(step)).prompt_logprobs
    check(records, dense_logprobs(runner, ids)[:-1], ids[1:], VOCAB if k < 0 else k)


def test_pieces_of_prompts_side_by_side(runner):
    """One row in the middle of its prompt, one at its start; then the rest of both, of one token and of many."""
    a, b = prompt(31), prompt(40, seed=1)
    first, second = make_request(runner, a, prompt_logprobs=2), make_request(runner, b, prompt_logprobs=5)
    ranges = [PromptRange(0, 1, 30), PromptRange(1, 1, 12)]
    one = runner.launch(make_step([(first, 0, 30), (second, 0, 12)], prompt_ranges=ranges))
    ranges = [PromptRange(1, 13, 27)]  # the hidden state of a's last token scores no prompt token
    two = runner.launch(make_step([(first, 30, 1), (second, 12, 28)], admit=False, prompt_ranges=ranges))
    of_a, of_b = runner.collect(one).prompt_logprobs
    result = runner.collect(two)
    check(of_a, dense_logprobs(runner, a)[:30], a[1:], 2)
    check(of_b + result.prompt_logprobs[0], dense_logprobs(runner, b)[:-1], b[1:], 5)
    assert [len(tokens) for tokens in result.token_ids] == [1, 1]


def test_of_a_decode_program(runner):
    """A step of one token a row may hold the last piece of a prompt."""
    ids = prompt(20)
    request = make_request(runner, ids, prompt_logprobs=1)
    runner.collect(runner.launch(make_step([(request, 0, 18)])))
    step = make_step([(request, 18, 1)], admit=False, prompt_ranges=[PromptRange(0, 19, 1)])
    (records,) = runner.collect(runner.launch(step)).prompt_logprobs
    check(records, dense_logprobs(runner, ids)[18:19], ids[19:], 1)


def test_nobody_asks(runner):
    request = make_request(runner, prompt(5))
    launched = runner.launch(make_step([(request, 0, 5)]))
    assert launched.prompt_scores == [] and runner.collect(launched).prompt_logprobs == []


def test_the_memory_of_all_chunks_of_a_step_is_counted(runner):
    """They are collected together: two chunks of 64 positions, of all tokens the id, log-probability and rank."""
    scores, scoring = runner._prompts.step_bytes(TOKENS)
    assert scores >= 2 * 64 * 3 * 4 * VOCAB and scoring > 0
    assert runner._largest_step_bytes() > scores + scoring
