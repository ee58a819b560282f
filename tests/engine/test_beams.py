"""Beam search on the tiny model: what a search finds that asks the model anew for every prefix."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpaged.core.beam_search import BeamSearch, Hypothesis
from jaxpaged.core.sampling_params import SamplingParams
from tests.engine.tiny import VOCAB, Answer, run

PROMPT = np.random.default_rng(3).integers(3, VOCAB, 40).tolist()
PARAMS = SamplingParams(use_beam_search=True, beam_width=3, n=3, temperature=0, max_tokens=9, logprobs=2)
SETTINGS = {
    "roomy": {},
    "no overlap": {"overlap": False},
    "no cache": {"caching": False},
    "tiny pool": {"blocks": 5, "caching": False},
    "tiny pool, cached": {"blocks": 5},
    "swapped": {"blocks": 6, "scheduling": {"num_host_blocks": 40}},
    "chunks": {"tokens": 16},
    "two rows": {"seqs": 2},
}


@pytest.fixture(scope="module")
def found() -> dict[tuple[int, ...], list[Hypothesis]]:
    return {}


@pytest.fixture
def search(make_engine, found):
    """The definition: each beam is a prompt of its own."""

    def search(eos: tuple[int, ...] = ()) -> list[Hypothesis]:
        if eos not in found:
            search = BeamSearch(PARAMS, max_tokens=PARAMS.max_tokens, eos_token_ids=eos)
            one = SamplingParams(
                temperature=0, max_tokens=1, logprobs=search.num_candidates, logprobs_mode="processed_logprobs"
            )
            beams = [PROMPT]
            while not search.finished:
                answers = run(make_engine(caching=False, overlap=False), beams, one)
                children = search.advance([answer.logprobs[0] for answer in answers])
                beams = [[*beams[child.parent], child.token] for child in children]
            found[eos] = search.results()
        return found[eos]

    return search


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("ends", [False, True])
def test_it_finds_the_likeliest_sequences(setting, ends, make_engine, search):
    eos = (search()[0].token_ids[4],) if ends else ()
    engine = make_engine(eos=eos, **SETTINGS[setting])
    engine.add_request(engine.make_request("beams", PROMPT, PARAMS))
    engine.add_request(engine.make_request("other", PROMPT[:20], SamplingParams(temperature=0, max_tokens=20)))
    answers: dict[tuple[str, int], Answer] = {}
    while engine.has_work:
        for update in engine.step():
            answers.setdefault((update.request_id, update.index), Answer()).take(update)
        engine.scheduler.check_invariants()
    for index, best in enumerate(search(eos)):
        answer = answers["beams", index]
        assert answer.token_ids == best.token_ids
        assert (answer.finish_reason, answer.stop_reason) == (best.finish_reason, best.stop_reason)
        assert best.logprobs is not None
        np.testing.assert_allclose(
            [r.logprob for r in answer.logprobs], [r.logprob for r in best.logprobs], atol=1e-4, rtol=0
        )
    assert engine.scheduler.block_manager.num_used_blocks == 0
