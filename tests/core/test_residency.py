"""Too few blocks: who waits, who is preempted, and what comes of it."""

import pytest

from tests.core.driver import Driver
from tests.core.steps import prompt_of, step_until


@pytest.mark.parametrize("sizes", [(12, 12), (12, 12, 12), (19, 12, 3), (10, 19, 10)])
def test_prompts_that_do_not_fit_together_do_not_wait_for_each_other(sizes):
    driver = Driver(num_blocks=20, block_size=4, max_num_batched_tokens=16, max_model_len=200)
    for i, blocks in enumerate(sizes):
        driver.add(f"r{i}", prompt_of(blocks * 4 - 1, i), max_tokens=6)
    driver.run(limit=100)  # `step` itself is the watchdog
    driver.check_solo()


@pytest.mark.parametrize("sizes", [(12, 12), (16, 3, 3), (7, 7, 7)])
def test_a_prompt_is_held_back_rather_than_admitted_and_preempted(sizes):
    driver = Driver(num_blocks=20, block_size=4, max_num_batched_tokens=16, max_model_len=200)
    for i, blocks in enumerate(sizes):
        driver.add(f"r{i}", prompt_of(blocks * 4, i), max_tokens=4)
    driver.run()
    assert driver.scheduler.num_preemptions == 0
    driver.check_solo()


@pytest.mark.parametrize("overlap", [0, 1])
def test_preemption_twice_and_in_mid_prompt_changes_no_output(overlap):
    driver = Driver(num_blocks=20, block_size=4, max_num_batched_tokens=8, max_model_len=100, overlap=overlap)
    driver.add("first", prompt_of(5, 1), max_tokens=60)
    request = driver.add("a", prompt_of(30), max_tokens=20)

    def preempt():
        scheduler = driver.scheduler
        assert scheduler.running[-1] is request
        scheduler._residency.preempt(request)
        scheduler.check_invariants()
        assert scheduler.waiting[0] is request, "it waits in front"

    step_until(driver, lambda: 0 < request.num_computed_tokens < 30 and len(driver.scheduler.running) == 2)
    preempt()
    step_until(driver, lambda: request.num_output_tokens == 6)
    preempt()
    driver.run()
    driver.check_solo()
    assert request.num_preemptions >= 2


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_output_stays_output_though_it_is_prefilled_again(num_host_blocks):
    """B34: `min_tokens` counts from the prompt's end; the device is told where that is, and what was preempted."""
    driver = Driver(num_blocks=40, block_size=4, scheduler_options={"num_host_blocks": num_host_blocks})
    driver.add("first", prompt_of(3, 1), max_tokens=40)
    request = driver.add("a", prompt_of(9), max_tokens=30, min_tokens=20, stop_token_ids=list(range(1000))[:64])
    driver.device.sample = lambda prefix: [5]
    step_until(driver, lambda: request.num_output_tokens == 10)
    driver.scheduler._residency.preempt(request)
    step_until(driver, lambda: driver.last_step and driver.last_step.admissions)
    (admission,) = driver.last_step.admissions
    assert admission.request.num_prompt_tokens == 9 and len(admission.request.output_token_ids) >= 10
    driver.run()
    assert driver.streamed["a"] == [5] * 20 and driver.finished["a"].stop_reason == 5


def test_the_latest_is_preempted_and_comes_back_first():
    driver = Driver(num_blocks=9, block_size=4, max_num_seqs=3, max_num_batched_tokens=40, max_model_len=60)
    names = ["first", "second", "third", "fourth"]
    for i, name in enumerate(names):
        driver.add(name, prompt_of(7, i), max_tokens=20)
    scheduler, order = driver.scheduler, []
    while scheduler.has_work or driver.pending:
        driver.step()
        assert [r.request_id for r in scheduler.running + scheduler.waiting] == [
            name for name in names if name not in driver.finished
        ], "order of arrival holds across both queues"
        order += [name for name in driver.finished if name not in order]
    assert order == names and scheduler.num_preemptions > 0 and driver.requests["first"].num_preemptions == 0
    driver.check_solo()


def test_counters():
    driver = Driver(num_blocks=10, block_size=4, max_num_seqs=2, max_num_batched_tokens=40)
    prompt = prompt_of(16)
    for name in "abc":
        driver.add(name, prompt, max_tokens=12)
    scheduler = driver.scheduler
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 3)
    driver.step()
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert driver.manager.num_used_blocks == 5, "three of a's four blocks are b's too, in the very first step"
    driver.run()
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    # Each prompt counts once, whatever a preempted request finds again.
    assert (scheduler.prefix_cache_queries, scheduler.prefix_cache_hits) == (48, 24)
    assert [driver.finished[name].num_cached_tokens for name in "abc"] == [0, 12, 12]
