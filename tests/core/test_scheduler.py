"""The scheduler over a simulated device: every read of every row is checked, see `Driver`."""

import random

import pytest

from jaxpaged.core.prefix_cache import sha256
from jaxpaged.core.request import Status
from jaxpaged.core.step import StepResult
from jaxpaged.core.step_sizes import StepSizes
from jaxpaged.errors import InvalidRequestError, RequestTooLargeError
from tests.core.driver import Driver


def prompt_of(length, seed=0):
    return random.Random(seed).choices(range(10, 900), k=length)


def rows_of(driver):
    """The last step as {request id: tokens}."""
    step = driver.last_step
    return {r.request_id: n for r, n in zip(step.requests, step.num_tokens, strict=True)} if step else {}


def step_until(driver, condition, limit=200):
    while not condition():
        driver.step()
        limit -= 1
        assert limit, "it never came"


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


def scripted(driver, tokens):
    """Makes the device answer with these tokens, one after another."""
    answers = iter(tokens)
    driver.device.sample = lambda prefix: [next(answers)]


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


# Too few blocks


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


def test_salts_do_not_mix():
    """B63"""
    driver = Driver(num_blocks=60, block_size=4, max_num_batched_tokens=64)
    for i, salt in enumerate([None, "A", "B", "A", None]):
        driver.add(f"r{i}", prompt_of(40), max_tokens=3, cache_salt=salt, n=2)
        driver.run()
    driver.check_solo()
    assert [driver.finished[f"r{i}"].num_cached_tokens for i in range(5)] == [0, 0, 0, 36, 36]


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


# Prefixes


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_a_prompt_that_is_wholly_cached_computes_its_last_token_again(length, together):
    driver = Driver(num_blocks=20, block_size=16, max_num_batched_tokens=100)
    for name in "ab":
        driver.add(name, prompt_of(length), max_tokens=20)
        if not together:
            driver.run()
    driver.run()
    driver.check_solo()
    assert driver.finished["b"].num_cached_tokens == (length - 1) // 16 * 16
    assert driver.streamed["a"] == driver.streamed["b"]


def test_generated_blocks_are_shared_too():
    driver = Driver(num_blocks=20, block_size=4, max_num_batched_tokens=40)
    driver.add("turn 1", prompt_of(6), max_tokens=10)
    driver.run()
    driver.add("turn 2", prompt_of(6) + driver.streamed["turn 1"] + [5, 6], max_tokens=3)
    driver.run()
    driver.check_solo()
    assert driver.finished["turn 2"].num_cached_tokens == 12  # 15 were computed: the last was never fed


@pytest.mark.parametrize("num_hashes", [1, 8, 64])
def test_colliding_hashes_change_no_output(num_hashes):
    def hash_function(data):
        return bytes([sha256(data)[0] % num_hashes])

    driver = Driver(num_blocks=30, block_size=2, max_num_batched_tokens=20, hash_function=hash_function)
    for i in range(24):
        prompt = [[1] * 12, [1, 2] * 6, [2, 1] * 6, [1, 1, 2, 2] * 3][i % 4]
        driver.add(f"r{i}", prompt, max_tokens=4, cache_salt=[None, "a"][i % 2])
        driver.step()
    driver.run()
    driver.check_solo()
    assert num_hashes < 64 or driver.scheduler.prefix_cache_hits > 0


def test_new_weights_are_used_at_once():
    driver = Driver(num_blocks=20, block_size=4)
    for i in range(2):
        driver.add(f"r{i}", prompt_of(12), max_tokens=4)
        driver.run()
        driver.check_solo(f"r{i}")
        driver.reset_weights()
    assert [driver.finished[f"r{i}"].num_cached_tokens for i in range(2)] == [0, 0]


# Fairness


def test_prompts_never_starve_decodes():
    """B61"""
    driver = Driver(num_blocks=400, block_size=4, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=200)
    decodes = [driver.add(f"d{i}", prompt_of(3, i), max_tokens=60) for i in range(4)]
    step_until(driver, lambda: all(r.num_inflight_tokens or r.num_output_tokens for r in decodes))
    for i in range(50):
        driver.add(f"p{i}", prompt_of(64, 100 + i), max_tokens=2)
        driver.step()
        assert all(rows_of(driver)[r.request_id] == 1 for r in decodes)
        assert driver.last_step.total_tokens == 16, "and the prompts get the rest"
    driver.run()
    driver.check_solo()


@pytest.mark.parametrize("num_giants", [1, 2])
def test_a_short_prompt_starts_while_a_giant_one_is_on_its_way(num_giants):
    driver = Driver(num_blocks=2000, block_size=4, max_num_batched_tokens=64, max_model_len=5000)
    giants = [driver.add(f"giant{i}", prompt_of(2000, i), max_tokens=2) for i in range(num_giants)]
    driver.step()
    short = driver.add("short", prompt_of(10, 9), max_tokens=2)
    step_until(driver, lambda: short.num_output_tokens, limit=5)
    assert all(giant.num_computed_tokens < 1000 for giant in giants)
    driver.run()
    driver.check_solo()


def test_a_giant_prompt_alone_gets_the_whole_step():
    driver = Driver(num_blocks=400, block_size=4, max_num_seqs=3, max_num_batched_tokens=32, max_model_len=1500)
    for i in range(2):
        driver.add(f"d{i}", [1, i], max_tokens=60)
    driver.step()
    driver.add("giant", prompt_of(1000), max_tokens=2)
    driver.step()
    assert rows_of(driver) == {"d0": 1, "d1": 1, "giant": 30}
    driver.add("nowhere to go", prompt_of(5, 5), max_tokens=2)  # no slot: it must cost the giant nothing
    driver.step()
    assert rows_of(driver) == {"d0": 1, "d1": 1, "giant": 30}


def test_prompts_that_fit_go_whole_in_order():
    driver = Driver(num_blocks=400, block_size=4, max_num_seqs=8, max_num_batched_tokens=32)
    for i in range(4):
        driver.add(f"r{i}", prompt_of(20, i), max_tokens=2)
    driver.step()
    assert rows_of(driver) == {"r0": 20, "r1": 12}
    driver.step()
    assert rows_of(driver) == {"r0": 1, "r1": 8, "r2": 20, "r3": 3}
    driver.run()
    driver.check_solo()


# Prompts cut to fill padded shapes


def make_padded(*sizes, tokens=64, **options):
    return Driver(
        num_blocks=400,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=tokens,
        max_model_len=200,
        scheduler_options={"step_sizes": StepSizes(lambda: sizes)},
        **options,
    )


def test_the_end_of_a_prompt_waits_where_it_would_need_much_padding():
    driver = make_padded(16, 32, 64)
    driver.add("a", prompt_of(3), max_tokens=20)
    driver.step()
    driver.add("b", prompt_of(20, 1), max_tokens=20)
    driver.add("c", prompt_of(14, 2), max_tokens=20)
    driver.step()
    assert rows_of(driver) == {"a": 1, "b": 20, "c": 11}, "35 tokens, cut to 32"
    driver.step()
    assert rows_of(driver) == {"a": 1, "b": 1, "c": 3}
    driver.run()
    driver.check_solo()


def test_a_prompt_is_taken_whole_where_little_is_padded():
    driver = make_padded(16, 32, 64)
    driver.add("a", prompt_of(30), max_tokens=2)
    driver.step()
    assert rows_of(driver) == {"a": 30}
    driver.run()
    driver.check_solo()


def test_a_prefix_that_is_found_leaves_some_of_the_budget_unused():
    driver = make_padded(16, 32, 64)
    driver.add("a", prompt_of(33), max_tokens=1)
    driver.run()
    driver.add("b", prompt_of(33), max_tokens=2)
    driver.step()
    assert rows_of(driver) == {"b": 1}, "the cut was for 33 tokens"
    driver.run()
    driver.check_solo()


@pytest.mark.parametrize("overlap", [0, 1])
def test_cuts_delay_no_decode_and_starve_no_prompt(overlap):
    driver = make_padded(4, 8, 16, 32, 64, overlap=overlap)
    decodes = [driver.add(f"d{i}", prompt_of(3, i), max_tokens=100) for i in range(5)]
    step_until(driver, lambda: all(r.num_inflight_tokens or r.num_output_tokens for r in decodes))
    for i in range(40):
        prompt = driver.add(f"p{i}", prompt_of(1 + 37 * i % 60, 100 + i), max_tokens=1)
        steps = 0
        while not prompt.finish_reason:
            driver.step()
            steps += 1
            assert not driver.last_step or all(rows_of(driver)[d.request_id] == 1 for d in decodes if d.slot >= 0)
        assert steps <= 3 + overlap, prompt.num_prompt_tokens
        if any(d.finish_reason for d in decodes):
            break
    driver.run()
    driver.check_solo()


# Long prompts and the loop


@pytest.mark.parametrize("cached", [False, True])
def test_a_step_looks_up_and_hashes_only_a_part_of_a_long_prompt(cached):
    num_hashed = 0

    def counting(data):
        nonlocal num_hashed
        num_hashed += 1
        return sha256(data)

    driver = Driver(
        num_blocks=1000,
        block_size=4,
        max_num_batched_tokens=64,
        max_model_len=1500,
        hash_function=counting,
        search_limit=20,
    )
    prompt = prompt_of(1000)
    if cached:
        driver.add("first", prompt, max_tokens=1)
        driver.run()
    other = driver.add("other", [1, 2, 3], max_tokens=500)
    driver.step()
    driver.add("long", prompt, max_tokens=2)
    while "long" not in driver.finished:
        num_hashed, before = 0, other.num_computed_tokens
        driver.step()
        assert num_hashed <= 22, "a root, a part of the search or of the chunk, and what the others fill"
        assert other.num_computed_tokens == before + 1
    assert driver.finished["long"].num_cached_tokens == (996 if cached else 0)
    driver.abort("other")
    driver.run()
    driver.check_solo("long")


def test_the_search_for_a_long_prefix_is_done_at_once_if_nobody_waits_for_it():
    driver = Driver(num_blocks=600, block_size=4, max_num_batched_tokens=64, max_model_len=900, search_limit=10)
    for name in ("first", "second"):
        driver.add(name, prompt_of(400), max_tokens=1)
        driver.step()
        assert rows_of(driver) == {name: 64 if name == "first" else 4}
        driver.run()
    driver.check_solo()
