"""The engine on a tiny model: samples, grammars, deadlines, queues, other weights."""

from __future__ import annotations

import dataclasses
import time

import jax
import numpy as np
import pytest

from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputs
from jaxpaged.errors import CheckpointError, InvalidRequestError, QueueFullError
from tests.engine.tiny import BLOCK, GREEDY, VOCAB, Answer, prompt, run

OVERLAP = pytest.mark.parametrize("overlap", [True, False])


def greedy(**options) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 12} | options))


def play(engine, *requests, each_step=None) -> dict[tuple[str, int], Answer]:
    """Runs requests together to their end; answers by id and sample."""
    for request in requests:
        engine.add_request(request)
    answers: dict[tuple[str, int], Answer] = {}
    steps = 0
    while engine.has_work:
        for update in engine.step():
            answers.setdefault((update.request_id, update.index), Answer()).take(update)
        engine.scheduler.check_invariants()
        steps += 1
        assert steps < 5000, "no progress"
        if each_step:
            each_step(engine)
    stats = engine.stats
    assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert engine.num_compilations == 0
    return answers


# --- samples ---------------------------------------------------------------------------------------------------


@OVERLAP
def test_one_sample_is_aborted_and_the_others_go_on(make_engine, overlap) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=30)
    engine = make_engine(overlap=overlap)
    expected = play(engine, engine.make_request("r", prompt(40), params))
    assert engine.stats.prefix_cache_queries == 40  # the prompt counts once

    def leave(engine) -> None:
        nonlocal steps
        steps += 1
        if steps == 6:
            (update,) = engine.abort("r", 1)
            assert (update.index, update.finish_reason) == (1, "abort")
            assert engine.abort("r", 1) == []

    steps = 0
    answers = play(engine, engine.make_request("r", prompt(40), params), each_step=leave)
    assert answers["r", 1].finish_reason is None and 0 < len(answers["r", 1].token_ids) < 30
    for index in (0, 2):
        assert answers["r", index].token_ids == expected["r", index].token_ids


# --- grammars --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Steps:
    """Token t is one of `allowed[t]`; after the last it is finished. `faults`: what to do at a step instead."""

    allowed: list[list[int]]
    faults: dict[str, int] = dataclasses.field(default_factory=dict)
    at: int = 0
    error: str = ""

    @property
    def finished(self) -> bool:
        return self.at == len(self.allowed)

    def accept(self, token_id: int) -> bool:
        if self.faults.get("accept raises") == self.at:
            raise RuntimeError("out of breath")
        if token_id not in self.allowed[self.at] or self.faults.get("refuse") == self.at:
            self.error = f"no {token_id} here"
            return False
        self.at += 1
        return True

    def fill(self, mask: np.ndarray) -> None:
        if self.faults.get("fill raises") == self.at:
            raise RuntimeError("out of ink")
        bits = np.zeros(32 * len(mask), np.uint8)
        bits[self.allowed[self.at]] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def copy(self) -> Steps:
        return dataclasses.replace(self)


GRAMMAR = StructuredOutputs(regex="x")  # the engine looks at what it was compiled to


def constrained(engine, name: str, grammar: Steps, **options):
    params = SamplingParams(**({"seed": 3, "max_tokens": 20, "structured_outputs": GRAMMAR} | options))
    return engine.make_request(name, prompt(9), params, grammar=grammar)


@OVERLAP
def test_each_token_is_one_that_the_grammar_allows(make_engine, solo, overlap) -> None:
    """Beside a request without one, which is not touched; each sample has its own."""
    rng = np.random.default_rng(0)
    allowed = [rng.choice(VOCAB, size, replace=False).tolist() for size in (1, 3, 200, 1, 31, 2, 64)]
    engine = make_engine(overlap=overlap)
    request = constrained(engine, "grammar", Steps(allowed), n=2)
    answers = play(engine, request, engine.make_request("plain", prompt(20), GREEDY))
    for index in (0, 1):
        answer = answers["grammar", index]
        assert answer.finish_reason == "stop" and len(answer.token_ids) == len(allowed)
        assert all(token in among for token, among in zip(answer.token_ids, allowed, strict=True))
    assert answers["grammar", 0].token_ids != answers["grammar", 1].token_ids
    assert answers["plain", 0].token_ids == solo(prompt(20)).token_ids


@OVERLAP
@pytest.mark.parametrize(
    ("fault", "text"), [("fill raises", "out of ink"), ("accept raises", "out of breath"), ("refuse", "no ")]
)
@pytest.mark.parametrize("at", [0, 2])
def test_a_grammar_that_fails_ends_its_own_sample(make_engine, solo, overlap, fault, text, at) -> None:
    """S21."""
    engine = make_engine(overlap=overlap)
    allowed = [[5, 6, 7]] * 6
    answers = play(
        engine,
        constrained(engine, "bad", Steps(allowed, {fault: at})),
        constrained(engine, "good", Steps(allowed)),
        engine.make_request("plain", prompt(20), GREEDY),
    )
    assert answers["bad", 0].finish_reason == "error" and text in str(answers["bad", 0].stop_reason)
    assert len(answers["bad", 0].token_ids) == at
    assert (answers["good", 0].finish_reason, len(answers["good", 0].token_ids)) == ("stop", 6)
    assert answers["plain", 0].token_ids == solo(prompt(20)).token_ids


# --- deadlines and queues --------------------------------------------------------------------------------------


@OVERLAP
def test_a_request_whose_time_is_over_ends_as_it_is(make_engine, solo, overlap) -> None:
    engine = make_engine(overlap=overlap)
    late = engine.make_request("late", prompt(9), greedy(timeout=0.0))
    slow = engine.make_request("slow", prompt(9), greedy(timeout=1.0, max_tokens=100))
    answers = play(
        engine, late, slow, engine.make_request("plain", prompt(20), GREEDY), each_step=lambda _: time.sleep(0.02)
    )
    for name in ("late", "slow"):
        assert (answers[name, 0].finish_reason, answers[name, 0].stop_reason) == ("abort", "timeout")
    assert answers["late", 0].token_ids == []
    assert 0 < len(answers["slow", 0].token_ids) < 100
    assert answers["plain", 0].token_ids == solo(prompt(20)).token_ids


def test_an_engine_with_nothing_else_to_do_still_tells_of_a_timeout(make_engine) -> None:
    engine = make_engine()
    answers = play(engine, engine.make_request("late", prompt(9), greedy(timeout=0.0)))
    assert answers["late", 0].stop_reason == "timeout"


def test_a_full_queue_refuses(make_engine) -> None:
    engine = make_engine(seqs=2, scheduling={"max_num_queued_requests": 3})
    for i in range(2):
        engine.add_request(engine.make_request(f"runs {i}", prompt(9), GREEDY))
        engine.step()
    for i in range(3):
        engine.add_request(engine.make_request(f"waits {i}", prompt(9), GREEDY))
    with pytest.raises(QueueFullError, match="3"):
        engine.add_request(engine.make_request("too many", prompt(9), GREEDY))
    assert len(play(engine)) == 5


# --- the cache and the weights ---------------------------------------------------------------------------------


def test_salts_keep_prefixes_apart(make_engine) -> None:
    """S01."""
    engine, token_ids = make_engine(), prompt(3 * BLOCK + 1)
    cached = []
    for i, salt in enumerate(["a", "a", "b", None, None]):
        answers = play(engine, engine.make_request(str(i), token_ids, GREEDY, cache_salt=salt))
        cached.append(answers[str(i), 0].num_cached_tokens)
    assert cached == [0, 3 * BLOCK, 0, 0, 3 * BLOCK]
    assert engine.stats.prefix_cache_hits == 6 * BLOCK and engine.stats.prefix_cache_queries == 5 * len(token_ids)


def test_a_forgotten_prefix_is_not_found(make_engine) -> None:
    engine, token_ids = make_engine(), prompt(3 * BLOCK + 1)
    run(engine, [token_ids])
    assert run(engine, [token_ids])[0].num_cached_tokens == 3 * BLOCK
    engine.reset_prefix_cache()
    assert run(engine, [token_ids])[0].num_cached_tokens == 0


@pytest.fixture
def own_params(runner):
    """Puts the shared runner's weights back."""
    kept = runner.params
    yield kept
    runner.params = kept


def test_other_weights_without_compiling_or_copying(make_engine, solo, own_params) -> None:
    engine, token_ids = make_engine(), prompt(3 * BLOCK + 1)
    before = run(engine, [token_ids])[0]
    other = jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, own_params)
    engine.update_params(other)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(other)]
    assert pointers == [x.unsafe_buffer_pointer() for x in jax.tree.leaves(engine.runner.params)]
    after = run(engine, [token_ids])[0]
    assert after.num_cached_tokens == 0 and after.token_ids != before.token_ids
    assert after.token_ids == solo(token_ids).token_ids
    engine.update_params(own_params)
    assert run(engine, [token_ids])[0] == before
    assert engine.num_compilations == 0


def test_host_arrays_are_weights_too(make_engine, own_params) -> None:
    engine = make_engine()
    before = run(engine, [prompt(9)])[0]
    engine.update_params(jax.tree.map(np.asarray, own_params))
    assert run(engine, [prompt(9)])[0].token_ids == before.token_ids
    assert engine.num_compilations == 0


def test_weights_that_do_not_fit_are_listed_and_change_nothing(make_engine, own_params) -> None:
    engine = make_engine()
    before = run(engine, [prompt(9)])[0]
    leaves, structure = jax.tree.flatten(own_params)
    wrong = [leaves[0][..., :-1], leaves[1].astype("bfloat16"), *leaves[2:]]
    with pytest.raises(CheckpointError, match="2 mis-shaped") as caught:
        engine.update_params(jax.tree.unflatten(structure, wrong))
    assert "bfloat16" in str(caught.value)
    key = next(iter(own_params))
    with pytest.raises(CheckpointError, match=rf"(?s)missing: .*{key}.*unused: extra"):
        engine.update_params({**{k: v for k, v in own_params.items() if k != key}, "extra": np.zeros(3)})
    assert engine.runner.params is own_params
    assert run(engine, [prompt(9)])[0].token_ids == before.token_ids


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "params", "text"),
    [
        ({}, {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({}, {"logits_processors": {"mine": {}}}, "mine"),
        ({}, {"logprobs": -1}, "logprobs=-1"),
        ({"cache_salt": ""}, {}, "cache_salt"),
        ({"priority": 2**31}, {}, "priority"),
    ],
)
def test_wrong_parameters_are_refused_and_disturb_nobody(make_engine, solo, options, params, text) -> None:
    """B21."""

    def intrude(engine) -> None:
        with pytest.raises(InvalidRequestError, match=text):
            engine.make_request("bad", prompt(9), greedy(**params), **options)

    assert run(make_engine(), [prompt(9)], each_step=intrude)[0] == solo(prompt(9))
