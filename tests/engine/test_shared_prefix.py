"""Requests with a long common beginning: it is computed once, read once for all, and changes no answer."""

import random

import pytest

from jaxpaged.core.sampling_params import SamplingParams
from tests.engine.tiny import VOCAB, run

RNG = random.Random(0)
PREFIX = RNG.choices(range(10, VOCAB), k=84)
PROMPTS = [[*PREFIX, *RNG.choices(range(10, VOCAB), k=1 + i)] for i in range(7)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)


@pytest.mark.parametrize("among_others", [False, True])
def test_answers_are_those_of_each_alone(make_engine, solo, among_others):
    prompts = [[9, 8, 7], *PROMPTS[:4], PROMPTS[4][5:], *PROMPTS[5:]] if among_others else PROMPTS
    engine = make_engine(blocks=64 * 4, poison=True)
    answers = run(engine, prompts, PARAMS)
    assert engine.stats.prefix_cache_hits >= 80 * 4
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = solo(prompt, PARAMS)
        assert answer.token_ids == alone.token_ids
        for ours, theirs in zip(answer.logprobs, alone.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
