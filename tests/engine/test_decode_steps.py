"""Several decode steps as one program: the same tokens, the same ends, and no compilation (the engine is strict)."""

from __future__ import annotations

import pytest

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.engine import Engine
from tests.engine.tiny import prompt as make_prompt
from tests.engine.tiny import run

PROMPTS = [make_prompt(n, seed=n) for n in (5, 23, 40)]
RANDOM = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
MIXED = [
    SamplingParams(temperature=0.0, max_tokens=30),
    SamplingParams(**RANDOM, seed=5, max_tokens=30),
    SamplingParams(
        **RANDOM,
        seed=6,
        max_tokens=30,
        min_tokens=3,
        presence_penalty=1.0,
        repetition_penalty=1.2,
        logit_bias={7: 3.0, 9: -50.0},
        logits_processors={"shift": {"by": 2.0}},
    ),
]


class Watched:
    """What an engine's steps of several were asked to do, and did."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.asked: list[int] = []
        self.done: list[int] = []
        collect = engine.runner.collect

        def watch(launched):
            result = collect(launched)
            if launched.step.num_steps > 1:
                self.asked.append(launched.step.num_steps)
                self.done.append(result.num_steps)
            return result

        self._collect = watch

    def run(self, monkeypatch, params, **options):
        monkeypatch.setattr(self.engine.runner, "collect", self._collect)
        answers = run(self.engine, PROMPTS, params, **options)
        monkeypatch.undo()
        return answers


@pytest.mark.parametrize("params", [MIXED[:1] * 3, MIXED], ids=["greedy", "of every kind"])
def test_the_same_tokens_in_fewer_steps(make_engine, monkeypatch, params):
    expected = run(make_engine(max_steps=1), PROMPTS, params)
    watched = Watched(make_engine(max_steps=8))
    assert watched.run(monkeypatch, params) == expected
    assert watched.asked == watched.done and sum(watched.done) >= 20 and max(watched.done) == 8
    stats = watched.engine.stats
    assert stats.num_generated_tokens == 90 and 30 <= stats.num_steps <= 34, "several count as what they are"


@pytest.mark.parametrize("options", [{}, {"ignore_eos": True}, {"min_tokens": 20}])
def test_it_stops_when_a_row_ends(make_engine, monkeypatch, options):
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    tokens = run(make_engine(max_steps=1), PROMPTS, greedy)[0].token_ids
    eos = next(token for i, token in enumerate(tokens) if i >= 6 and token not in tokens[:i])
    params = SamplingParams(temperature=0.0, max_tokens=40, **options)
    expected = run(make_engine(max_steps=1, eos=[eos]), PROMPTS, params)
    watched = Watched(make_engine(max_steps=8, eos=[eos]))
    assert watched.run(monkeypatch, params) == expected
    if not options:
        assert expected[0].finish_reason == "stop" and watched.done != watched.asked


def test_it_stops_where_nothing_can_be_sampled(make_engine, monkeypatch):
    """One row has no token left once it may not end any more; its neighbours go on."""
    stuck = SamplingParams(temperature=0.0, max_tokens=30, allowed_token_ids=[5, 6], stop_token_ids=[5], min_tokens=9)
    params = [MIXED[0], stuck, MIXED[0]]
    expected = run(make_engine(max_steps=1), PROMPTS, params)
    assert run(make_engine(max_steps=8), PROMPTS, params) == expected


def test_aborts_and_arrivals_on_the_way(make_engine):
    """What is asked for while several steps run waits for their end, and no longer."""
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    alone = run(make_engine(max_steps=1, caching=False), PROMPTS, greedy)
    engine = make_engine(max_steps=8)
    for i in range(2):
        engine.add_request(engine.make_request(f"r{i}", PROMPTS[i], greedy))
    while engine._in_flight is None or engine._in_flight.step.num_steps == 1:
        engine.step()
    engine.abort("r0")
    engine.add_request(engine.make_request("r2", PROMPTS[2], greedy))
    got: dict[str, list[int]] = {}
    for count in range(100):
        updates = engine.step()
        assert "r0" not in {update.request_id for update in updates}
        for update in updates:
            got.setdefault(update.request_id, []).extend(update.new_token_ids)
        if count == 0:
            assert len(got["r1"]) == 8 and engine._in_flight is None
        engine.scheduler.check_invariants()
        if not engine.has_work:
            break
    assert got["r2"] == alone[2].token_ids
    assert got["r1"] == alone[1].token_ids[-len(got["r1"]) :]
    assert engine.scheduler.block_manager.num_used_blocks == 0
