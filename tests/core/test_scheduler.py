"""The scheduler over a simulated device: every read of every row is checked, see `Driver`."""

import random

import pytest

from jaxpaged.core.request import Status
from jaxpaged.core.step import StepResult
from jaxpaged.errors import InvalidRequestError, RequestTooLargeError
from tests.core.driver import Driver
from tests.core.steps import prompt_of, rows_of, scripted, step_until


# What a step looks like
def test_prompts_and_decodes_share_a_step_one_token_rows_first():
    driver = Driver(num_blocks=40, block_size=4, max_num_batched_tokens=16)
    driver.add("a", prompt_of(5), max_tokens=9)
    driver.step()
    driver.add("long", prompt_of(40, 1), max_tokens=2)
    driver.add("one", [3], max_tokens=9)
    driver.step()
    assert list(rows_of(driver).items()) == [("a", 1), ("one", 1), ("long", 14)]
    assert driver.last_step.samples == [True, True, False]
    assert [a.request.request_id for a in driver.last_step.admissions] == ["long", "one"]
    driver.run()
    driver.check_solo()


def test_new_blocks_follow_the_cached_prefix():
    driver = Driver(num_blocks=20, block_size=4, max_num_batched_tokens=32)
    prompt = prompt_of(14)
    driver.add("a", prompt, max_tokens=1)
    driver.run()
    first = driver.last_step
    b = driver.add("b", prompt, max_tokens=4)
    driver.step()
    (admission,) = driver.last_step.admissions
    assert len(admission.block_ids) == 3 and first is not driver.last_step
    assert driver.last_step.starts == [12] and driver.last_step.num_tokens == [2]
    assert driver.last_step.new_blocks == [(b.slot, 3, b.block_ids[3])]
    driver.run()
    driver.check_solo()


def test_logprobs_are_wanted_where_a_sampling_row_wants_them():
    driver = Driver(num_blocks=40, block_size=4, max_num_batched_tokens=8)
    driver.add("none", [1, 2], max_tokens=20)
    driver.step()
    assert driver.last_step.wants_logprobs is False
    driver.add("five", prompt_of(12), max_tokens=2, logprobs=5)
    driver.add("zero", [1, 2], max_tokens=5, logprobs=0)
    driver.step()
    assert rows_of(driver)["five"] < 12 and driver.last_step.wants_logprobs is True
    step_until(driver, lambda: driver.requests["five"].num_inflight_tokens)
    assert driver.last_step.wants_logprobs is True
    driver.run()
    driver.add("last", [1, 2], max_tokens=2)
    driver.step()
    assert driver.last_step.wants_logprobs is False


def test_with_overlap_the_second_step_comes_before_the_first_result():
    driver = Driver(num_blocks=10, block_size=4)
    request = driver.add("a", [1, 2, 3], max_tokens=2)
    assert driver.step() == []
    assert driver.step() != [] and driver.last_step.starts == [3]
    assert request.num_output_tokens == 1 and request.num_inflight_tokens == 1
    assert driver.step()[0].finish_reason == "length"
    assert driver.last_step is None, "nothing may be fed past max_tokens"


# Ends
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("max_tokens", [1, 2, 7, None])
@pytest.mark.parametrize("from_end", [1, 2, 16])
def test_length_is_exact_up_to_the_context(overlap, max_tokens, from_end):
    driver = Driver(num_blocks=40, block_size=4, max_model_len=32, overlap=overlap)
    driver.add("a", prompt_of(32 - from_end), max_tokens=max_tokens)
    driver.run()
    assert len(driver.streamed["a"]) == min(from_end, max_tokens or from_end)
    assert driver.finished["a"].finish_reason == "length"
    driver.check_solo()


@pytest.mark.parametrize("length", [32, 33, 500])
def test_a_prompt_without_room_for_a_token_is_refused(length):
    driver = Driver(num_blocks=400, block_size=4, max_model_len=32)
    with pytest.raises(RequestTooLargeError, match=rf"{length} tokens.*context of 32") as error:
        driver.add("a", prompt_of(length), max_tokens=1)
    assert error.value.param == "prompt"
    driver.add("b", prompt_of(5), max_tokens=3)
    driver.run()
    driver.check_solo("b")


def test_a_prompt_longer_than_a_step_is_cut_in_chunks():
    driver = Driver(num_blocks=40, block_size=4, max_num_batched_tokens=8)
    driver.add("long", prompt_of(50), max_tokens=3)
    driver.add("short", prompt_of(3, 1), max_tokens=3)
    driver.run()
    driver.check_solo()


@pytest.mark.parametrize("length", [40, 41, 170])
def test_a_prompt_larger_than_the_pool_is_refused_and_blocks_nobody(length):
    driver = Driver(num_blocks=10, block_size=4, max_model_len=1000)
    needed = -(-(length + 1) // 4)
    with pytest.raises(RequestTooLargeError, match=rf"need {needed} blocks .* has 10"):
        driver.add("a", prompt_of(length), max_tokens=1)
    driver.add("b", prompt_of(5), max_tokens=3)
    driver.run()
    driver.check_solo("b")


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("length", [1, 39])
def test_a_request_that_outgrows_the_pool_ends_with_length(overlap, length):
    driver = Driver(num_blocks=10, block_size=4, max_model_len=1000, overlap=overlap)
    driver.add("a", prompt_of(length), max_tokens=500)
    driver.add("b", prompt_of(7), max_tokens=5)
    driver.run()
    assert driver.finished["a"].finish_reason == "length"
    assert length + len(driver.streamed["a"]) == 10 * 4 + 1, "all the pool is used; the last token needs no place"
    driver.check_solo()


def test_an_empty_prompt_is_refused():
    driver = Driver(num_blocks=10, block_size=4)
    with pytest.raises(InvalidRequestError, match="empty"):
        driver.add("a", [])


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    ("params", "script", "count", "reason", "stop_reason"),
    [
        ({"eos": [7]}, [5, 7, 9, 9, 9], 2, "stop", None),
        ({"eos": [7, 8]}, [5, 8, 9, 9, 9], 2, "stop", None),
        ({"stop_token_ids": [7]}, [5, 7, 9, 9, 9], 2, "stop", 7),
        ({"eos": [7], "stop_token_ids": [7]}, [7, 9], 1, "stop", None),
        ({"eos": [7], "ignore_eos": True}, [7, 7, 7, 7, 7], 4, "length", None),
        ({"eos": [7], "ignore_eos": True, "stop_token_ids": [7]}, [5, 7, 9], 2, "stop", 7),
        ({"eos": [7], "min_tokens": 3}, [7, 7, 7, 9, 9], 3, "stop", None),
        ({"stop_token_ids": [7], "min_tokens": 3}, [7, 5, 5, 7, 9], 4, "stop", 7),
        ({"eos": [7], "min_tokens": 4}, [7, 7, 7, 5, 5], 4, "length", None),
        ({"eos": [7]}, [5, 5, 5, 7, 5], 4, "stop", None),  # at the limit, stop wins
    ],
)
def test_what_ends_a_request(overlap, params, script, count, reason, stop_reason):
    driver = Driver(num_blocks=10, block_size=4, overlap=overlap)
    driver.add("a", [1, 2, 3], max_tokens=4, **params)
    scripted(driver, script)
    driver.run()
    update = driver.finished["a"]
    assert driver.streamed["a"] == script[:count]
    assert (update.finish_reason, update.stop_reason) == (reason, stop_reason)


def test_several_tokens_of_a_row_are_cut_at_the_end():
    driver = Driver(num_blocks=10, block_size=4, overlap=0)
    for name, max_tokens in (("stop", 9), ("length", 4), ("more", 9)):
        driver.add(name, [1, 2, 3], max_tokens=max_tokens, stop_token_ids=[7])
    scheduler = driver.scheduler
    scheduler.update(scheduler.schedule(), StepResult([[4], [4], [4]]))
    step = scheduler.schedule()
    names = [["a", "b", "c", "d"]] * 3
    updates = scheduler.update(step, StepResult([[5, 7, 7, 8], [5, 6, 8, 9], [5, 6, 8, 9]], names))
    assert [u.new_token_ids for u in updates] == [[5, 7], [5, 6, 8], [5, 6, 8, 9]]
    assert [u.logprobs for u in updates] == [["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]]
    assert [u.finish_reason for u in updates] == ["stop", "length", None]
    assert driver.requests["more"].output_token_ids == [4, 5, 6, 8, 9]
    scheduler.check_invariants()
    step = scheduler.schedule()  # those whose keys and values are not computed are caught up with
    assert (step.starts, step.num_tokens, step.samples) == ([4], [4], [True])


# Names
def test_a_live_id_is_refused_and_a_finished_one_can_come_again():
    """B50"""
    driver = Driver(num_blocks=10, block_size=4)
    driver.add("a", [1, 2, 3], max_tokens=9)
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        driver.add("a", [4], max_tokens=1)
    driver.step()
    driver.step()
    driver.abort("a")
    del driver.finished["a"]
    driver.add("a", [4, 5], max_tokens=3)  # while a row of the first one is still in flight
    driver.run()
    driver.check_solo("a")


# Aborts
ABORT_WHEN = {
    "waiting": lambda r: r.status is Status.WAITING and not r.num_preemptions,
    "in mid-prompt": lambda r: 0 < r.num_computed_tokens < r.num_prompt_tokens,
    "with its first token in flight": lambda r: r.num_inflight_tokens and not r.num_output_tokens,
    "decoding": lambda r: r.num_output_tokens > 3 and r.status is Status.RUNNING,
    "preempted with a token in flight": lambda r: r.status is Status.WAITING and r.num_inflight_tokens,
    "preempted": lambda r: r.status is Status.WAITING and r.num_preemptions and not r.num_inflight_tokens,
    "with its last token in flight": lambda r: r.num_tokens + r.num_inflight_tokens == r.max_total_tokens,
}


@pytest.mark.parametrize("when", ABORT_WHEN)
def test_an_abort_frees_everything_and_touches_nobody(when):
    driver = Driver(num_blocks=16, block_size=4, max_num_seqs=3, max_num_batched_tokens=10, overlap=2)
    victims = [driver.add(f"v{i}", prompt_of(12, i), max_tokens=22) for i in range(3)]
    for i in range(3):
        driver.add(f"n{i}", prompt_of(6, 10 + i), max_tokens=12)
    step_until(driver, lambda: any(ABORT_WHEN[when](r) for r in victims))
    victim = next(r for r in victims if ABORT_WHEN[when](r))
    (update,) = driver.abort(victim.request_id)
    assert update.finish_reason == "abort" and update.new_token_ids == []
    assert victim.block_ids == [] and victim.slot == -1
    assert driver.abort(victim.request_id) == [], "once is enough"
    driver.run()
    driver.check_solo(*(name for name in driver.requests if name != victim.request_id))


def test_abort_of_a_finished_or_unknown_request_is_nothing():
    driver = Driver(num_blocks=16, block_size=4)
    driver.add("a", [1], max_tokens=1)
    driver.run()
    assert driver.abort("a") == driver.abort("b") == []


def test_random_aborts_lose_no_block():
    """B51"""
    rng = random.Random(1)
    driver = Driver(num_blocks=24, block_size=4, max_num_seqs=4, max_num_batched_tokens=12)
    for i in range(120):
        driver.add(f"r{i}", prompt_of(rng.randint(1, 30), i % 7), max_tokens=rng.randint(1, 20))
        for _ in range(rng.randint(0, 4)):
            driver.step()  # checks free + referenced + cached == total
        if rng.random() < 0.7:
            driver.abort(f"r{rng.randint(0, i)}")
    driver.run()
    driver.check_solo(*(name for name, update in driver.finished.items() if update.finish_reason != "abort"))
    assert driver.manager.num_free_blocks + driver.manager.num_cached_blocks == 24
