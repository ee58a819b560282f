"""What a request may want besides tokens: a grammar's mask, scores of its prompt, an end in time."""

import pytest

from jaxpaged.core.request import FAILURES
from jaxpaged.core.step import NONE_ALLOWED, NOT_FINITE, PromptRange, StepResult
from tests.core.driver import Driver
from tests.core.solo import FakeGrammar
from tests.core.steps import prompt_of, scripted, step_until

VOCAB_SIZE = 24

# Grammars


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("fault", ["", "refuses", "raises", "cannot fill"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_fault_of_a_grammar_ends_its_sample_alone(fault, at, overlap):
    driver = Driver(num_blocks=40, block_size=4, vocab_size=VOCAB_SIZE, overlap=overlap)
    driver.add("a", [2, 3, 4], max_tokens=9, grammar=FakeGrammar(VOCAB_SIZE, 5, fault, at))
    driver.add("b", [2, 3, 4], max_tokens=9, grammar=FakeGrammar(VOCAB_SIZE, 50))
    driver.add("c", [2, 3, 4], max_tokens=9)
    driver.run()
    driver.check_solo()
    update = driver.finished["a"]
    assert (update.finish_reason, len(driver.streamed["a"])) == (("error", at) if fault else ("stop", 5))
    assert bool(update.stop_reason) == bool(fault)
    assert [driver.finished[key].finish_reason for key in "bc"] == ["length", "length"]


def test_a_masked_row_is_scheduled_while_its_token_is_in_flight():
    driver = Driver(num_blocks=40, block_size=4, vocab_size=VOCAB_SIZE)
    request = driver.add("a", prompt_of(20), max_tokens=9, grammar=FakeGrammar(VOCAB_SIZE, 5))
    driver.step()
    assert driver.last_step.masked == [], "a chunk samples nothing"
    driver.step()
    driver.step()
    assert driver.last_step.masked == [0] and driver.last_step.starts == [20]
    driver.run()
    assert len(request.output_token_ids) == 5


def test_a_token_that_stops_need_not_be_the_grammars():
    driver = Driver(num_blocks=40, block_size=4, overlap=0)
    request = driver.add("a", [1, 2], max_tokens=9, stop_token_ids=[7], grammar=FakeGrammar(VOCAB_SIZE, 5))
    scheduler = driver.scheduler
    (update,) = scheduler.update(scheduler.schedule(), StepResult([[7]]))
    assert (update.finish_reason, update.stop_reason, request.grammar.count) == ("stop", 7, 0)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("num_host_blocks", [0, 50])
def test_grammars_under_preemption(overlap, num_host_blocks):
    driver = Driver(
        num_blocks=9,
        block_size=4,
        vocab_size=VOCAB_SIZE,
        overlap=overlap,
        scheduler_options={"num_host_blocks": num_host_blocks},
    )
    for i in range(4):
        driver.add(f"r{i}", [2, 3, i], max_tokens=20, grammar=FakeGrammar(VOCAB_SIZE, 15 + i))
    driver.run()
    driver.check_solo()
    assert driver.scheduler.num_preemptions


def test_a_failed_sample_is_gone_with_its_row_in_flight():
    driver = Driver(num_blocks=40, block_size=4)
    request = driver.add("a", [1, 2, 3], max_tokens=9)
    driver.step()
    update = driver.scheduler.fail(request, "no mask")
    driver._note([update])
    assert (update.finish_reason, update.stop_reason) == ("error", "no mask")
    driver.run()
    assert driver.streamed["a"] == []


@pytest.mark.parametrize("code", [NOT_FINITE, NONE_ALLOWED])
def test_what_is_no_token_is_an_error_and_dropped(code):
    """After NaN nobody starts with what is cached."""
    driver = Driver(num_blocks=40, block_size=4, overlap=0)
    driver.add("a", [1, 2, 3, 4], max_tokens=9)
    scripted(driver, [5, code])
    driver.run()
    assert driver.streamed["a"] == [5]
    assert (driver.finished["a"].finish_reason, driver.finished["a"].stop_reason) == FAILURES[code]
    assert (driver.manager.num_cached_blocks > 0) == (code == NONE_ALLOWED)


# Several tokens in a step


@pytest.mark.parametrize("params", [{}, {"stop_token_ids": [3, 4, 5]}, {"eos": [3, 4, 5], "min_tokens": 6}])
def test_several_tokens_in_a_step_are_cut_where_one_by_one_ends(params):
    """B10"""
    driver = Driver(num_blocks=60, block_size=4, vocab_size=VOCAB_SIZE, overlap=0, burst=True)
    for i in range(8):
        driver.add(f"r{i}", [2, 3, i], max_tokens=6 + i, n=2, logprobs=2, **params)
    updates = []
    while driver.scheduler.has_work:
        updates += driver.step()
    assert max(len(update.new_token_ids) for update in updates) == 3
    driver.check_solo()


# Prompt log-probabilities


@pytest.mark.parametrize("chunk", [4, 5, 16, 64])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 50])
def test_prompt_logprobs_in_chunks(length, chunk):
    """B39"""
    driver = Driver(num_blocks=40, block_size=4, max_num_batched_tokens=chunk)
    driver.add("a", prompt_of(length), prompt_logprobs=2, max_tokens=3)
    driver.step()
    if length > 1:
        assert driver.last_step.prompt_ranges == [PromptRange(0, 1, min(chunk, length - 1))]
    driver.run()
    driver.check_solo()
    assert len(driver.prompt_logprobs["a"]) == length - 1


def test_prompt_logprobs_write_the_prefix_cache_and_do_not_read_it():
    """B38"""
    driver = Driver(num_blocks=40, block_size=16, max_num_batched_tokens=64)
    for name, prompt in (("a", prompt_of(33)), ("b", prompt_of(33)), ("c", [*prompt_of(33)[:16], 5, 6, 7])):
        driver.add(name, prompt, prompt_logprobs=1, max_tokens=2)
        driver.run()
    driver.add("plain", prompt_of(33), max_tokens=2)
    driver.run()
    driver.check_solo()
    assert [driver.finished[key].num_cached_tokens for key in driver.finished] == [0, 0, 0, 32]


@pytest.mark.parametrize("num_host_blocks", [0, 50])
@pytest.mark.parametrize("at", [4, 17, 29, 32])
def test_prompt_logprobs_come_once_though_preempted(at, num_host_blocks):
    driver = Driver(
        num_blocks=40,
        block_size=4,
        max_num_batched_tokens=8,
        scheduler_options={"num_host_blocks": num_host_blocks},
    )
    driver.add("first", prompt_of(4, 1), max_tokens=30)
    request = driver.add("a", prompt_of(30), prompt_logprobs=1, n=2, max_tokens=5)
    step_until(driver, lambda: request.num_computed_tokens >= at)
    step_until(driver, lambda: driver.scheduler.running[-1].request_id == "a")
    while request in driver.scheduler.running:
        driver.scheduler._residency.preempt(driver.scheduler.running[-1])
    driver.run()
    driver.check_solo()
    assert request.num_preemptions and len(driver.prompt_logprobs["a"]) == 29


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("length", [1, 5, 30])
def test_a_request_for_no_tokens_scores_its_prompt(length, overlap):
    driver = Driver(num_blocks=40, block_size=4, overlap=overlap)
    driver.add("a", prompt_of(length), prompt_logprobs=0, logprobs=1, max_tokens=0)
    driver.run()
    driver.check_solo()
    update = driver.finished["a"]
    assert (driver.streamed["a"], update.finish_reason, update.logprobs) == ([], "length", [])
    assert len(driver.prompt_logprobs["a"]) == length - 1


# Timeouts


def timed_out(driver, name="a"):
    return (driver.finished[name].finish_reason, driver.finished[name].stop_reason) == ("abort", "timeout")


STATES = {
    "waiting": {"num_blocks": 40, "max_num_seqs": 1},
    "running": {"num_blocks": 40},
    "preempted": {"num_blocks": 6},
    "swapped": {"num_blocks": 6, "scheduler_options": {"num_host_blocks": 50}},
}


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("state", STATES)
def test_a_request_ends_in_time_whatever_its_state(state, overlap):
    driver = Driver(block_size=4, max_num_batched_tokens=32, overlap=overlap, **STATES[state])
    driver.add("first", prompt_of(3, 1), max_tokens=18)
    request = driver.add("a", prompt_of(3), max_tokens=18, timeout=12.5)
    driver.run()
    driver.check_solo()
    assert timed_out(driver) and driver.finished["first"].finish_reason == "length"
    assert (request.num_preemptions > 0) == (state in ("preempted", "swapped"))
    assert (len(driver.streamed["a"]) > 0) == (state != "waiting")


def test_a_timeout_is_told_when_nothing_else_runs():
    driver = Driver(num_blocks=40, block_size=4)
    driver.add("a", [1, 2], max_tokens=5, timeout=0)
    assert [u.stop_reason for u in driver.step()] == ["timeout"] and driver.last_step is None
    assert not driver.scheduler.has_work


def test_every_sample_times_out():
    driver = Driver(num_blocks=40, block_size=4)
    driver.add("a", prompt_of(6), n=3, max_tokens=40, timeout=8)
    driver.run()
    driver.check_solo()
    assert all(timed_out(driver, key) for key in driver.finished) and len(driver.finished) == 3


def test_deadlines_of_ended_requests_are_cleared():
    driver = Driver(num_blocks=40, block_size=4)
    for i in range(1000):
        driver.add(f"r{i}", [1, 2], max_tokens=1, timeout=1e9)
        driver.run()
    assert len(driver.scheduler._deadlines._heap) < 200
