"""Requests that wait for a prefix which an earlier one is computing: nothing is computed twice, nobody is held up."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.latecomers import Latecomers
from jaxpaged.core.request import Request, Status
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.snapshot import snapshot
from tests.core.driver import Driver
from tests.core.steps import prompt_of, rows_of

SHARED = prompt_of(64)


def run_together(count=6, **options):
    """Requests of 64 common tokens and 4 of their own, 16 tokens a step."""
    driver = Driver(**{"num_blocks": 200, "block_size": 4, "max_num_seqs": 8, "max_model_len": 100, **options})
    for i in range(count):
        driver.add(f"r{i}", [*SHARED, *prompt_of(4, i + 1)], max_tokens=3)
    return driver


def test_a_common_prefix_is_computed_once():
    driver = run_together()
    computed = 0
    while driver.scheduler.has_work or driver.pending:
        driver.step()
        computed += driver.last_step.num_prompt_tokens if driver.last_step else 0
    assert computed == 64 + 6 * 4
    assert driver.scheduler.prefix_cache_hits == 5 * 64
    driver.check_solo()


def test_without_a_prefix_cache_nobody_waits():
    driver = run_together(enable_prefix_caching=False)
    driver.step()
    assert len(rows_of(driver)) > 1
    driver.run()
    driver.check_solo()


def test_the_first_gets_the_whole_step_and_others_go_past():
    driver = run_together()
    driver.step()
    assert rows_of(driver) == {"r0": 16}
    driver.add("other", prompt_of(3, 99), max_tokens=1)
    driver.step()
    assert rows_of(driver) == {"other": 3, "r0": 13}
    driver.run()
    driver.check_solo()


def test_a_salt_keeps_them_apart():
    driver = run_together(count=1)
    driver.add("salted", [*SHARED, 5], max_tokens=1, cache_salt="tenant")
    driver.step()
    assert set(rows_of(driver)) == {"r0", "salted"}
    driver.run()
    driver.check_solo()


@pytest.mark.parametrize("gone", ["r0", "r1"])
def test_who_waits_goes_on_when_another_leaves(gone):
    driver = run_together(count=3)
    driver.step()
    assert [request.request_id for request in driver.scheduler._gate.latecomers.parked] == ["r1", "r2"]
    driver.abort(gone)
    driver.run()
    driver.check_solo()
    assert len(driver.finished) == 3


def test_new_weights_leave_nothing_to_wait_for():
    driver = run_together(count=3)
    driver.step()
    driver.reset_weights()
    driver.step()
    assert set(rows_of(driver)) == {"r0", "r1"}, "and r2 waits for r1 now"
    driver.run()
    driver.check_solo("r1", "r2")


def test_nobody_waits_for_a_later_one():
    """The one that would be waited for gets its tokens after the other."""
    driver = Driver(
        num_blocks=200,
        block_size=4,
        max_model_len=100,
        scheduler_options={"key": lambda request: request.priority},
    )
    driver.add("late", [*SHARED, 5], priority=1, max_tokens=1)
    driver.step()
    driver.add("first", [*SHARED, 6], priority=0, max_tokens=1)
    driver.step()
    assert set(rows_of(driver)) == {"late", "first"}
    driver.run()
    driver.check_solo()


def test_a_preempted_leader_lets_go():
    """Who waited behind it may go first: it has to begin anew."""
    driver = run_together(count=3)
    driver.step()
    driver.scheduler._residency.preempt(driver.requests["r0"])
    driver.step()
    assert not driver.scheduler._gate.latecomers.parked or driver.requests["r0"].status is Status.RUNNING
    driver.run()
    driver.check_solo()


def test_who_goes_before_them_takes_a_slot_that_is_kept():
    driver = Driver(
        num_blocks=200,
        block_size=4,
        max_num_seqs=4,
        max_model_len=100,
        scheduler_options={"key": lambda request: request.priority},
    )
    for i in range(4):
        driver.add(f"r{i}", [*SHARED, i + 1], priority=1, max_tokens=3)
    driver.step()
    assert len(driver.scheduler._gate.latecomers.parked) == 3
    driver.add("urgent", prompt_of(3, 99), priority=0, max_tokens=1)
    driver.step()
    assert rows_of(driver)["urgent"] == 3
    driver.run()
    driver.check_solo()


def test_no_more_wait_here_than_could_run():
    driver = run_together(count=30)
    driver.step()
    assert len(driver.scheduler._gate.latecomers.parked) == 7 and len(driver.scheduler.waiting) == 22
    shown = snapshot(driver.scheduler).requests
    assert [request.request_id for request in shown] == [f"r{i}" for i in range(30)]
    driver.run()
    driver.check_solo()


def request_of(tokens, name="r", order=0, **options):
    request = Request(name, tokens, SamplingParams(), max_model_len=1000, **options)
    request.sort_key = (0, order, 0)
    return request


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(0, 90), st.integers(0, 90), st.integers(0, 8))
def test_holds_while_whole_blocks_are_missing(mine, theirs, common, computed, found):
    """The same as counting token by token."""
    size = 4
    rng = random.Random(0)
    base = rng.choices(range(100), k=100)
    tokens, other = ([*base[:common], *([mark] * 100)] for mark in (200, 300))
    request, leader = request_of(tokens[:mine], order=1), request_of(other[:theirs])
    leader.status, leader.num_computed_tokens = Status.RUNNING, min(computed, theirs)
    found = min(found * size, mine - 1, common) // size * size
    shared = min(common, mine - 1, theirs) // size * size
    latecomers = Latecomers(size)
    held = latecomers.hold(request, found, [leader])
    assert held == (leader.num_computed_tokens < theirs and shared > max(found, leader.num_computed_tokens))
    if held:
        leader.num_computed_tokens = shared - 1
        assert latecomers.release(leader.weight_version) == [] and latecomers.parked == [request]
        leader.num_computed_tokens = shared
        assert latecomers.release(leader.weight_version) == [request] and not latecomers.parked
