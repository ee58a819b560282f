"""Beams under a scheduler: what they find is what a search alone finds, whatever happens to their blocks."""

import math

import pytest

from jaxpaged.core.draft import Draft
from jaxpaged.core.step import NONE_ALLOWED, Step, StepResult, TokenLogprobs
from tests.core.driver import Driver
from tests.core.steps import prompt_of, step_until

VOCAB_SIZE = 24


def make(**options):
    return Driver(
        **{"num_blocks": 60, "block_size": 4, "max_num_batched_tokens": 32, "vocab_size": VOCAB_SIZE, **options}
    )


def add(driver, name="a", *, length=9, n=2, beam_width=3, max_tokens=8, **options):
    prompt = [token % VOCAB_SIZE for token in prompt_of(length)]
    return driver.add(
        name, prompt, use_beam_search=True, n=n, beam_width=beam_width, max_tokens=max_tokens, temperature=0, **options
    )


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("length", [1, 4, 7, 8, 9, 40])
@pytest.mark.parametrize("options", [{}, {"eos": [0, 1, 2]}, {"logprobs": 2, "early_stopping": "never", "eos": [3]}])
def test_it_finds_what_a_search_alone_finds(options, length, enable_prefix_caching, overlap):
    driver = make(overlap=overlap, enable_prefix_caching=enable_prefix_caching)
    add(driver, length=length, **options)
    driver.run()
    driver.check_solo()
    assert list(driver.finished) == ["a", "a#1"]


def test_beams_share_blocks_and_copy_what_they_write():
    driver = make()
    add(driver, length=10, max_tokens=9)
    driver.step()
    assert driver.last_step.wants_logprobs and driver.last_step.copies == []
    driver.step()
    driver.step()
    step = driver.last_step
    assert step.num_tokens == [1, 1, 1] and step.starts == [10] * 3
    first, *others = step.requests
    assert step.copies == [(first.block_ids[2], other.block_ids[2]) for other in others]
    assert all(other.block_ids[:2] == first.block_ids[:2] for other in others)
    assert [a.request for a in step.admissions] == others, "the likeliest token is on the device already"
    driver.run()
    driver.check_solo()
    assert driver.scheduler.prefix_cache_queries == 10


def test_a_beam_waits_for_its_decision_and_others_do_not():
    driver = make()
    add(driver)
    driver.add("b", [1, 2], max_tokens=20)
    rows = []
    while driver.scheduler.has_work:
        driver.step()
        rows.append([r.request_id for r in driver.last_step.requests] if driver.last_step else [])
    driver.check_solo()
    assert rows[1] == rows[3] == ["b"] and sorted(rows[2]) == sorted(rows[4]) == ["a", "a", "a", "b"]
    assert all("b" in row for row in rows[:20]), "it has a row in every step"


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("num_host_blocks", [0, 3, 50])
@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(5, 4), (5, 1), (8, 4), (60, 2)])
def test_beams_in_a_tiny_pool(num_blocks, max_num_seqs, num_host_blocks, enable_prefix_caching, overlap):
    driver = make(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        overlap=overlap,
        enable_prefix_caching=enable_prefix_caching,
        scheduler_options={"num_host_blocks": num_host_blocks},
    )
    add(driver)
    driver.add("b", prompt_of(7, 1), max_tokens=10)
    add(driver, "c", length=3, eos=[0, 1, 2])
    driver.add("d", prompt_of(7, 2), max_tokens=10)
    driver.run()
    driver.check_solo()


def test_an_idle_beam_gives_up_its_place_unless_it_is_copied_from():
    driver = make(max_num_seqs=2)
    add(driver)
    scheduler = driver.scheduler

    def idle():
        return [r for r in scheduler.running if r.group.can_yield(r)]

    step_until(driver, idle)
    beam = idle()[-1]
    assert not scheduler._gate._displace_idle_beam(Draft(9, Step(copies=[(1, 2)]))) and beam in scheduler.running
    assert scheduler._gate._displace_idle_beam(Draft(9)) and beam not in scheduler.running + scheduler.waiting
    scheduler.check_invariants()
    driver.run()
    driver.check_solo()


def test_beams_that_outgrow_the_pool_end_with_length():
    driver = make(num_blocks=4, overlap=0)
    add(driver, length=5, max_tokens=50)
    driver.run()
    driver.check_solo()
    assert [len(tokens) for tokens in driver.streamed.values()] == [12, 12]


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_blocks", [6, 60])
def test_an_abort_gives_the_best_so_far(num_blocks, after):
    driver = make(num_blocks=num_blocks, overlap=1)
    add(driver, max_tokens=12)
    driver.add("b", prompt_of(7, 1), max_tokens=10)
    for _ in range(after):
        driver.step()
    assert [(u.index, u.finish_reason) for u in driver.abort("a")] == [(0, "abort"), (1, "abort")]
    assert driver.abort("a") == []
    driver.run()
    driver.check_solo()


@pytest.mark.parametrize("num_blocks", [6, 60])
def test_a_search_ends_in_time(num_blocks):
    driver = make(num_blocks=num_blocks)
    add(driver, max_tokens=12, timeout=8)
    driver.run()
    assert [u.stop_reason for u in driver.finished.values()] == ["timeout"] * 2
    assert all(driver.streamed.values())


def test_prompt_logprobs_of_a_search():
    driver = make(max_num_batched_tokens=8)
    add(driver, length=20, prompt_logprobs=1)
    driver.run()
    driver.check_solo()
    assert len(driver.prompt_logprobs["a"]) == 19


def test_nan_ends_the_whole_search():
    driver = make(overlap=0)
    add(driver, length=5)
    scheduler = driver.scheduler
    updates = scheduler.update(scheduler.schedule(), StepResult([[-1]], [[]]))
    assert [(u.finish_reason, u.new_token_ids) for u in updates] == [("error", [])] * 2
    assert not scheduler.has_work
    scheduler.check_invariants()


def test_a_beam_that_can_go_nowhere_has_no_children():
    driver = make(overlap=0)
    add(driver, length=5, max_tokens=3, n=2, beam_width=2)
    scheduler = driver.scheduler

    def step(*rows):
        tokens, records = zip(*rows, strict=True)
        return scheduler.update(scheduler.schedule(), StepResult([[t] for t in tokens], [[r] for r in records]))

    def row(*best):
        return best[0], TokenLogprobs(best[0], -1.0, 1, list(best), [-1.0 - i for i in range(len(best))])

    nowhere = NONE_ALLOWED, TokenLogprobs(NONE_ALLOWED, math.nan, 1, [4, 5], [math.nan, -math.inf])
    assert step(row(4, 5)) == []
    assert step(nowhere, row(6, 7)) == []
    assert [r.output_token_ids for r in scheduler.running + scheduler.waiting] == [[5, 6], [5, 7]]
    updates = step(nowhere, nowhere)
    assert [(u.finish_reason, u.new_token_ids) for u in updates] == [("error", [])] * 2
    assert not scheduler.has_work and driver.manager.weight_version == 0
    scheduler.check_invariants()


def test_a_search_is_preempted_by_what_came_first():
    driver = make(num_blocks=12)
    driver.add("first", prompt_of(9, 3), max_tokens=30)
    request = add(driver, max_tokens=12)
    step_until(driver, lambda: driver.scheduler.num_preemptions)
    driver.run()
    driver.check_solo()
    assert request.finish_reason == "length"
