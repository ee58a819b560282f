"""Several samples of one prompt: they share its blocks, and nothing else."""

import pytest

from jaxpaged.core.request import Status
from tests.core.driver import Driver
from tests.core.solo import FakeGrammar
from tests.core.steps import prompt_of, step_until


def run_samples(*, length=14, n=3, max_tokens=9, **options):
    driver = Driver(**{"num_blocks": 60, "block_size": 4, "max_num_batched_tokens": 32, **options})
    driver.add("a", prompt_of(length), n=n, max_tokens=max_tokens)
    return driver


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 40])
def test_each_sample_is_what_it_would_be_alone(length, enable_prefix_caching, overlap):
    """B35"""
    driver = run_samples(length=length, overlap=overlap, enable_prefix_caching=enable_prefix_caching)
    driver.run()
    driver.check_solo()
    assert list(driver.finished) == ["a", "a#1", "a#2"] and len(set(map(tuple, driver.streamed.values()))) == 3
    assert driver.scheduler.prefix_cache_queries == length, "the prompt counts once"


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize(("length", "shared"), [(1, 0), (4, 0), (5, 1), (6, 1), (8, 1), (9, 2)])
def test_whole_blocks_are_shared_and_the_rest_is_copied(length, shared, enable_prefix_caching):
    driver = run_samples(length=length, enable_prefix_caching=enable_prefix_caching)
    first, *others = driver.requests.values()
    driver.step()
    assert [r.status for r in others] == [Status.WAITING] * 2, "they wait for the prompt"
    driver.step()
    step = driver.last_step
    assert step.requests == [first, *others] and step.num_tokens == [1, 1, 1]
    assert step.starts == [length, length - 1, length - 1]
    for other in others:
        assert other.block_ids[:shared] == first.block_ids[:shared]
        assert not set(other.block_ids[shared:]) & set(first.block_ids)
    partial = [(first.block_ids[shared], other.block_ids[shared]) for other in others]
    assert step.copies == (partial if (length - 1) % 4 else [])
    driver.run()
    driver.check_solo()


def test_samples_do_not_hold_up_others_while_the_prompt_is_computed():
    driver = Driver(num_blocks=400, block_size=4, max_num_batched_tokens=16, max_model_len=500)
    driver.add("giant", prompt_of(200), n=3, max_tokens=2)
    short = driver.add("short", prompt_of(3, 1), max_tokens=2)
    step_until(driver, lambda: short.num_output_tokens, limit=4)
    driver.run()
    driver.check_solo()


def test_nobody_looks_at_samples_whose_first_one_only_waits():
    driver = Driver(num_blocks=60, block_size=4, max_num_seqs=3)
    for i in range(20):
        driver.add(f"r{i}", prompt_of(30, i), n=2, max_tokens=3)
    followers = driver.scheduler._followers
    driver.step()
    assert list(followers._noticed) == driver.scheduler.running and len(followers.parked) == 20
    driver.abort("r7", 0)
    driver.step()
    assert len(followers.parked) == 19 and driver.requests["r7#1"] in driver.scheduler.waiting
    driver.run()
    driver.check_solo()


def test_cached_tokens_are_the_requests():
    """B35: a hit of the prompt counts once, though each sample reports it."""
    driver = run_samples(length=14)
    driver.run()
    driver.add("b", prompt_of(14), n=3, max_tokens=2)
    driver.run()
    driver.check_solo()
    assert [driver.finished[key].num_cached_tokens for key in driver.finished] == [0] * 3 + [12] * 3
    assert (driver.scheduler.prefix_cache_queries, driver.scheduler.prefix_cache_hits) == (28, 12)


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("num_host_blocks", [0, 20])
@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(5, 4), (7, 4), (9, 2), (20, 1)])
def test_samples_in_a_tiny_pool(num_blocks, max_num_seqs, num_host_blocks, enable_prefix_caching):
    """B35, with preemption."""
    driver = run_samples(
        n=4,
        length=10,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=enable_prefix_caching,
        scheduler_options={"num_host_blocks": num_host_blocks},
    )
    driver.run()
    driver.check_solo()
    assert all(len(tokens) == 9 for tokens in driver.streamed.values())


def test_a_first_sample_that_is_preempted_is_not_shared_with():
    driver = Driver(num_blocks=60, block_size=4, max_num_batched_tokens=32)
    driver.add("other", prompt_of(3, 5), max_tokens=9)
    first = driver.add("a", prompt_of(10), n=3, max_tokens=9)
    step_until(driver, lambda: first.num_computed_tokens == 10)
    driver.scheduler._residency.preempt(first)
    driver.run()
    driver.check_solo()
    assert first.num_preemptions == 1


def test_a_first_sample_that_ends_at_once_leaves_the_others():
    driver = run_samples(length=10, max_tokens=1, overlap=0)
    driver.run()
    driver.check_solo()


def test_new_weights_are_not_mixed_with_a_prompt_of_the_old_ones():
    driver = run_samples(length=10)
    first, *others = driver.requests.values()
    step_until(driver, lambda: first.num_computed_tokens == 10)
    driver.reset_weights()
    driver.run()
    driver.check_solo(*(f"a#{r.index}" for r in others))


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5])
def test_an_abort_ends_every_sample(after):
    """B51, n=3"""
    driver = run_samples(length=40)
    driver.add("b", prompt_of(6, 1), max_tokens=9)
    for _ in range(after):
        driver.step()
    updates = driver.abort("a")
    assert [(u.request_id, u.index, u.finish_reason) for u in updates] == [("a", i, "abort") for i in range(3)]
    assert driver.abort("a") == []
    driver.run()
    driver.check_solo()


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_an_abort_of_one_sample_leaves_the_others(index, after):
    driver = run_samples(length=20)
    for _ in range(after):
        driver.step()
    (update,) = driver.abort("a", index)
    assert update.index == index and driver.abort("a", index) == []
    driver.run()
    driver.check_solo()
    assert sum(update.finish_reason == "length" for update in driver.finished.values()) == 2


def test_each_sample_has_its_own_grammar():
    driver = Driver(num_blocks=40, block_size=4, vocab_size=24)
    driver.add("a", [2, 3, 4], n=3, max_tokens=20, grammar=FakeGrammar(24, 6))
    driver.run()
    driver.check_solo()
    assert [len(tokens) for tokens in driver.streamed.values()] == [6, 6, 6]
    assert len({request.grammar for request in driver.requests.values()}) == 3


@pytest.mark.parametrize("length", [6, 7, 8, 9])
def test_what_each_sample_generates_can_be_found_again(length):
    driver = run_samples(length=length)
    driver.run()
    for key in ("a", "a#1", "a#2"):
        turn = driver.add(f"after {key}", [*prompt_of(length), *driver.streamed[key], 5], max_tokens=2)
        driver.run()
        assert turn.num_cached_tokens == (length + 8) // 4 * 4, "the last token was never fed"
    driver.check_solo()
