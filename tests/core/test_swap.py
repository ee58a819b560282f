"""Preempted requests whose blocks are kept in host memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.host_pool import HostPool
from jaxpaged.core.step import Step, Swap
from tests.core.driver import Driver
from tests.core.steps import prompt_of, step_until


def make(num_host_blocks=50, **options):
    return Driver(
        **{"num_blocks": 20, "block_size": 4, "max_num_batched_tokens": 8, "max_model_len": 100, **options},
        scheduler_options={"num_host_blocks": num_host_blocks},
    )


def preempt(driver, request):
    """Preempts `request`, the last one that runs."""
    assert driver.scheduler.running[-1] is request
    driver.scheduler._residency.preempt(request)
    driver.scheduler.check_invariants()


def test_the_books_of_host_memory():
    pool, step = HostPool(5), Step()
    first, second = pool.save([1, 2, 3]), pool.save([4, 5])
    assert pool.save([6]) is None and pool.num_used_blocks == 5
    pool.drop(first)
    pool.flush(step)
    assert (step.swap_out, step.swap_in, step.dropped) == ([Swap(second, [4, 5])], [], []), "the first never left"
    third = pool.save([7])
    pool.flush(Step())
    pool.restore(second, [8, 9])
    pool.drop(third)
    pool.flush(step)
    assert (step.swap_out, step.swap_in, step.dropped) == ([], [Swap(second, [8, 9])], [third])
    assert pool.num_used_blocks == 0 and third not in (first, second)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("num_host_blocks", [0, 3, 8, 100])
def test_preemption_changes_no_output(num_host_blocks, enable_prefix_caching, overlap):
    """B59, by recompute (no host blocks), by swapping, and by both."""
    driver = Driver(
        num_blocks=15,
        block_size=16,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=200,
        overlap=overlap,
        enable_prefix_caching=enable_prefix_caching,
        scheduler_options={"num_host_blocks": num_host_blocks},
    )
    requests = [driver.add(f"r{i}", prompt_of(30, i), max_tokens=40) for i in range(6)]
    swaps = 0
    while driver.scheduler.has_work:
        driver.step()
        swaps += bool(driver.last_step and driver.last_step.swap_in)
    driver.run()
    driver.check_solo()
    assert driver.scheduler.num_preemptions == sum(r.num_preemptions for r in requests) > 0
    assert (swaps > 0) == (num_host_blocks > 0)
    assert all(len(driver.streamed[r.request_id]) == 40 for r in requests)


@pytest.mark.parametrize("overlap", [0, 1])
def test_twice_and_in_mid_prompt(overlap):
    """B59: nothing that was computed is computed again."""
    driver = make(overlap=overlap)
    driver.add("first", prompt_of(5, 1), max_tokens=60)
    request = driver.add("a", prompt_of(30), max_tokens=20)
    step_until(driver, lambda: 0 < request.num_computed_tokens < 30 and len(driver.scheduler.running) == 2)
    done = request.num_computed_tokens
    preempt(driver, request)
    driver.step()
    step = driver.last_step
    (swap,) = step.swap_in
    assert step.swap_out[0].key == swap.key and step.starts[-1] == done
    assert step.admissions[0].block_ids == swap.block_ids == request.block_ids[: len(swap.block_ids)]
    step_until(driver, lambda: request.num_output_tokens == 6)
    preempt(driver, request)
    driver.run()
    driver.check_solo()
    assert request.num_preemptions >= 2


def test_without_room_on_the_host_it_is_computed_again():
    driver = make(num_host_blocks=1)
    driver.add("first", prompt_of(5, 1), max_tokens=30)
    request = driver.add("a", prompt_of(12), max_tokens=9)
    step_until(driver, lambda: request.num_computed_tokens > 8)
    preempt(driver, request)
    assert request.num_computed_tokens == 0
    driver.run()
    driver.check_solo()
    assert not driver.device.host


def test_an_abort_gives_the_budget_back_at_once_and_the_copy_later():
    """B51: while swapped."""
    driver = make(num_blocks=8)
    driver.add("first", prompt_of(9, 1), max_tokens=18)
    request = driver.add("a", prompt_of(9), max_tokens=18)
    step_until(driver, lambda: request.host_key is not None)
    pool = driver.scheduler._residency.host_pool
    key = request.host_key
    assert pool.num_used_blocks and key in driver.device.host
    driver.abort("a")
    assert pool.num_used_blocks == 0
    driver.step()
    assert driver.last_step.dropped == [key] and not driver.device.host
    driver.run()
    driver.check_solo()


@pytest.mark.parametrize("lost", [False, True])
def test_what_others_hold_too_is_not_copied(lost):
    driver = make()
    first = driver.add("a", prompt_of(14), n=2, max_tokens=12)
    second = driver.scheduler._requests["a"][1]
    step_until(driver, lambda: second.num_output_tokens >= 2)
    table = list(second.block_ids)
    assert table[:3] == first.block_ids[:3] and table[3] != first.block_ids[3]
    preempt(driver, second)
    assert driver.scheduler._residency.host_pool.size(second.host_key) == len(table) - 3
    if lost:
        driver.manager._cache.remove(table[1])
    step_until(driver, lambda: second.slot >= 0)
    assert (second.block_ids[1] == table[1]) != lost
    driver.run()
    driver.check_solo()


@settings(max_examples=40)
@given(
    overlap=st.integers(0, 1),
    length=st.integers(4, 27),
    tokens=st.integers(1, 14),
    limit=st.integers(1, 3),
    lost=st.none() | st.integers(0, 9),
    first_ends=st.booleans(),
    heir=st.booleans(),
)
def test_what_was_not_copied_is_looked_up_again_and_no_more(overlap, length, tokens, limit, lost, first_ends, heir):
    """Whatever became of the shared prefix meanwhile, and however much of its own is still in the pool.

    Args:
      lost: which block of its table the cache forgets, if it has it and somebody holds it.
      first_ends, heir: the other one with that prefix ends; somebody else takes it over.
    """
    driver = make(num_blocks=40, overlap=overlap, search_limit=limit)
    driver.add("busy", prompt_of(3, 1), max_tokens=90)
    driver.add("a", prompt_of(length), n=2, max_tokens=20)
    second = driver.scheduler._requests["a"][1]
    step_until(driver, lambda: second.num_output_tokens >= tokens)
    table, cache = list(second.block_ids), driver.manager._cache
    preempt(driver, second)
    missing = len(table) - driver.scheduler._residency.host_pool.size(second.host_key)
    assert missing == length // 4 - (length % 4 == 0)
    if lost is not None and lost < len(table) and table[lost] in cache and driver.manager._refs[table[lost]]:
        cache.remove(table[lost])
    if first_ends:
        driver.abort("a", 0)
    if heir:
        driver.add("heir", prompt_of(length), max_tokens=2)
    looked_up, find = [], cache.find
    cache.find = lambda digest, *others: looked_up.append(digest) or find(digest, *others)
    while second.slot < 0:
        before = len(looked_up)
        driver.step()
        assert len(looked_up) - before <= (1 + heir) * (limit + 2), "bounded, though a miss is seen thrice"
    assert heir or lost is not None or len(looked_up) <= missing
    cache.find = find
    driver.run()
    driver.check_solo()


def test_the_last_abort_leaves_no_copy():
    driver = make(num_blocks=8)
    driver.add("first", prompt_of(9, 1), max_tokens=18)
    request = driver.add("a", prompt_of(9), max_tokens=18)
    step_until(driver, lambda: request.host_key in driver.device.host)
    for name in ("first", "a"):
        driver.abort(name)
    assert driver.scheduler.has_work
    driver.run()
    assert driver.last_step is None and not driver.device.host


def test_an_abort_before_the_copy_was_made_asks_for_none():
    driver = make()
    driver.add("first", prompt_of(9, 1), max_tokens=18)
    request = driver.add("a", prompt_of(9), max_tokens=18)
    step_until(driver, lambda: request.num_output_tokens)
    preempt(driver, request)
    driver.abort("a")
    driver.step()
    assert not driver.last_step.swap_out and not driver.last_step.dropped
    driver.run()
    driver.check_solo()


def test_new_weights_void_the_copies():
    """B63: what the old weights left is not read."""
    driver = make(num_blocks=8, max_model_len=64)
    driver.add("first", prompt_of(9, 1), max_tokens=18)
    request = driver.add("a", prompt_of(9), max_tokens=18)
    step_until(driver, lambda: request.host_key is not None)
    driver.reset_weights()
    assert request.host_key is None and request.num_computed_tokens == 0
    driver.abort("first")
    driver.run()
    assert request.finish_reason == "length" and not driver.device.host


def test_blocks_that_came_back_are_shared_again():
    driver = make(num_blocks=12)
    driver.add("first", prompt_of(9, 1), max_tokens=24)
    request = driver.add("a", prompt_of(17), max_tokens=12)
    step_until(driver, lambda: request.num_output_tokens)
    preempt(driver, request)
    manager = driver.manager
    for block in [block for block in manager.findable_blocks if not manager._refs[block]]:  # only the copy knows
        manager._cache.remove(block)
    manager.num_cached_blocks = 0
    step_until(driver, lambda: request.num_computed_tokens >= 17)
    driver.run()
    driver.add("b", prompt_of(17), max_tokens=2)
    driver.run()
    driver.check_solo()
    assert driver.finished["b"].num_cached_tokens == 16
