"""The schedule never changes the answer: token ids equal those of the request run alone (float32, CPU)."""

import jax
import numpy as np
import pytest
from msgspec.structs import replace

from jaxpaged.config import EngineConfig
from jaxpaged.core.policy import policy_key
from jaxpaged.core.sampling_params import SamplingParams
from tests.engine.tiny import BLOCK, GREEDY, Answer, prompt, run

SEEDED = SamplingParams(temperature=0.8, seed=42, max_tokens=12)
LENGTHS = [5, 15, 16, 17, 33, 64, 100]


@pytest.fixture(scope="module")
def right():
    """Solo answers, remembered: `right(solo, prompt, params)`."""
    known = {}

    def answer(solo, token_ids, params):
        key = (tuple(token_ids), repr(params))
        if key not in known:
            known[key] = solo(token_ids, params).token_ids
        return known[key]

    return answer


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("tokens", [8, 16, 64])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_any_batch_and_chunking(make_engine, solo, right, overlap, tokens, params):
    prompts = [prompt(n) for n in LENGTHS]
    answers = run(make_engine(tokens=tokens, overlap=overlap, poison=True), prompts, params)
    for p, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == right(solo, p, params), len(p)


@pytest.fixture
def swaps(runner, monkeypatch):
    """Counts the copies of preempted requests that go to the host and come back."""
    counts, launch = {"out": 0, "in": 0}, runner.launch

    def counting(step):
        counts["out"] += len(step.swap_out)
        counts["in"] += len(step.swap_in)
        return launch(step)

    monkeypatch.setattr(runner, "launch", counting)
    return counts


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("host_blocks", [0, 5, 100], ids=["recompute", "swap some", "swap all"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_preemption(make_engine, solo, right, swaps, overlap, host_blocks, params):
    """B59: six requests in a pool for about three, preempted more than once, some in mid-prefill."""
    params = replace(params, max_tokens=40)
    prompts = [prompt(30, seed) for seed in range(6)]
    scheduling = {"num_host_blocks": host_blocks}
    engine = make_engine(blocks=11, tokens=24, overlap=overlap, poison=True, scheduling=scheduling)
    answers = run(engine, prompts, params)
    preemptions = engine.scheduler.num_preemptions
    assert preemptions >= 3, "the pool is too large to test anything"
    assert swaps["out"] == swaps["in"] and (swaps["out"] > 0) == (host_blocks > 0)
    assert swaps["out"] == preemptions or host_blocks < 100
    for p, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == right(solo, p, params)
        assert answer.finish_reason == "length" and len(answer.token_ids) == 40


@pytest.mark.parametrize("host_blocks", [0, 100], ids=["recompute", "swap"])
def test_preemption_keeps_logprobs(make_engine, solo, host_blocks):
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=2)
    prompts = [prompt(30, seed) for seed in range(6)]
    engine = make_engine(blocks=14, tokens=24, scheduling={"num_host_blocks": host_blocks})
    answers = run(engine, prompts, params)
    assert engine.scheduler.num_preemptions
    alone = solo(prompts[5], params)
    np.testing.assert_allclose([x.logprob for x in answers[5].logprobs], [x.logprob for x in alone.logprobs], atol=1e-4)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 47])
@pytest.mark.parametrize("together", [True, False])
def test_prefix_hits(make_engine, solo, right, length, together):
    """B62: sent twice, and twice at once; at most length - 1 tokens come from the cache."""
    engine = make_engine()
    p = prompt(length)
    if together:
        answers = run(engine, [p, p, p])
    else:
        answers = [run(engine, [p])[0] for _ in range(3)]
    for answer in answers:
        assert answer.token_ids == right(solo, p, GREEDY)
        assert answer.num_cached_tokens <= length - 1
    assert answers[2].num_cached_tokens == (length - 1) // BLOCK * BLOCK


def test_prefix_hits_of_generated_tokens_and_other_tails(make_engine, solo, right):
    engine = make_engine()
    first = run(engine, [prompt(30)], SamplingParams(temperature=0, max_tokens=20))[0]
    conversation = prompt(30) + first.token_ids + prompt(5)
    tails = [prompt(32)[:20] + prompt(10, seed) for seed in range(3)]
    answers = run(engine, [conversation, *tails])
    assert answers[0].num_cached_tokens == 48
    for p, answer in zip([conversation, *tails], answers, strict=True):
        assert answer.token_ids == right(solo, p, GREEDY)


def test_a_constant_hash_changes_nothing(make_engine, solo, right):
    """S02: every block collides; stored token ids are compared, so the answers stay right."""
    engine = make_engine(hash_function=lambda data: b"same")
    prompts = [prompt(n, seed) for seed in range(3) for n in (20, 40)]
    for _ in range(2):
        for p, answer in zip(prompts, run(engine, prompts), strict=True):
            assert answer.token_ids == right(solo, p, GREEDY)


def test_salts_and_weights_do_not_share(make_engine, solo, tiny_params, runner):
    """B63: each is answered as if alone, and finds only what is its own."""
    engine = make_engine()
    other = jax.tree.map(lambda x: x * 1.25 if x.ndim > 1 else x, tiny_params)

    def ask(salt):
        engine.add_request(engine.make_request("r", prompt(40), GREEDY, cache_salt=salt))
        answer = Answer()
        while engine.has_work:
            for update in engine.step():
                answer.take(update)
        return answer.token_ids, answer.num_cached_tokens

    right = solo(prompt(40)).token_ids
    assert [ask(salt) for salt in (None, "A", "A", None)] == [(right, n) for n in (0, 0, 32, 32)]
    try:
        engine.update_params(other)
        changed = solo(prompt(40)).token_ids
        assert changed != right
        assert [ask(salt) for salt in (None, "A", "A")] == [(changed, n) for n in (0, 0, 32)]
    finally:
        engine.update_params(tiny_params)
    assert [ask(salt) for salt in ("A", None)] == [(right, 0), (right, 0)]


def test_garbage_in_unused_slots(make_engine, solo, right):
    """B64: the whole pool is NaN; contexts around a page's end; padding rows in the batch."""
    for n in (1, 15, 16, 17):
        answer = run(make_engine(poison=True), [prompt(n)])[0]
        assert answer.token_ids == right(solo, prompt(n), GREEDY)


def test_a_seeded_request_is_its_own(make_engine, solo, right):
    """B31: alone, beside unseeded, seeded and greedy neighbours, in another slot, from the cache, preempted."""
    a = prompt(20)
    expected = right(solo, a, SEEDED)
    unseeded = SamplingParams(temperature=1.0, max_tokens=9)
    other = SamplingParams(temperature=1.5, seed=7, top_p=0.7, max_tokens=15)
    engine = make_engine()
    assert run(engine, [a, prompt(9)], [SEEDED, unseeded])[0].token_ids == expected
    assert run(engine, [prompt(9), prompt(40), a], [other, GREEDY, SEEDED])[2].token_ids == expected
    tight = make_engine(blocks=6, tokens=16)
    answers = run(tight, [prompt(40), a], [replace(GREEDY, max_tokens=50), SEEDED])
    assert answers[1].token_ids == expected
    assert expected != right(solo, a, replace(SEEDED, seed=43))


def test_unseeded_requests_differ_but_the_engine_seed_fixes_them(make_engine):
    params = SamplingParams(temperature=1.0, max_tokens=12)
    first = [a.token_ids for a in run(make_engine(), [prompt(9)] * 3, params)]
    again = [a.token_ids for a in run(make_engine(), [prompt(9)] * 3, params)]
    assert first == again
    assert len({tuple(t) for t in first}) == 3


def test_decodes_are_not_starved(make_engine):
    """B61: four decodes run while prompts keep arriving; each gets a token at least every second step."""
    engine = make_engine(tokens=32, seqs=8)
    for i in range(4):
        engine.add_request(engine.make_request(f"d{i}", prompt(4, i), SamplingParams(temperature=0, max_tokens=60)))
    last_seen, arrived = {}, 0
    for step in range(50):
        if step > 3:
            params = replace(GREEDY, max_tokens=2)
            engine.add_request(engine.make_request(f"p{arrived}", prompt(64, arrived), params))
            arrived += 1
        for update in engine.step():
            if update.request_id.startswith("d"):
                assert step - last_seen.get(update.request_id, step) <= 2
                last_seen[update.request_id] = step
    assert len(last_seen) == 4 and all(49 - seen <= 2 for seen in last_seen.values())
    for name in list(engine.scheduler._requests):
        engine.abort(name)
    while engine.has_work:
        engine.step()


def test_a_short_prompt_overtakes_a_giant_one(make_engine):
    """B61: its first token comes before the giant prefill ends."""
    engine = make_engine(tokens=40)
    engine.add_request(engine.make_request("giant", prompt(120), replace(GREEDY, max_tokens=2)))
    engine.add_request(engine.make_request("short", prompt(6), GREEDY))
    order = []
    while engine.has_work:
        order += [update.request_id for update in engine.step()]
    assert order.index("short") < order.index("giant")


@pytest.mark.parametrize(("ageing", "ends"), [(8.0, True), (0.0, False)])
def test_ageing_lets_the_least_urgent_finish(make_engine, solo, ageing, ends):
    """B61: two rows; urgent requests arrive faster than they are served, one every second step."""
    key = policy_key(EngineConfig(scheduling_policy="priority", ageing=ageing))
    engine = make_engine(seqs=2, scheduling={"key": key})

    def add(name, token_ids, priority, step):
        request = engine.make_request(name, token_ids, GREEDY, priority=priority, arrival_time=float(step))
        engine.add_request(request)

    patient = Answer()
    for step in range(120):
        if step % 2 == 0:
            add(f"urgent{step}", prompt(5, step), 0, step)
        if step == 9:
            add("patient", prompt(20), 2, step)
        for update in engine.step():
            if update.request_id == "patient":
                patient.take(update)
    assert (patient.finish_reason is not None) == ends
    if ends:
        assert patient.token_ids == solo(prompt(20)).token_ids
    for name in list(engine.scheduler.roster.samples):
        engine.abort(name)
    while engine.has_work:
        engine.step()
