"""Steps that are several: how far they go, and that each request gets what it would in single ones."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.request import Status
from tests.core.driver import Driver
from tests.core.steps import prompt_of, step_until

ROOMY = {"num_blocks": 60, "block_size": 8, "max_num_batched_tokens": 64}


def steady(driver: Driver, count: int = 2, **params) -> None:
    """A few requests that decode."""
    for i in range(count):
        driver.add(f"r{i}", prompt_of(5, i), **params)
    while any(request.num_computed_tokens < request.num_prompt_tokens for request in driver.requests.values()):
        driver.step()


def sizes(driver: Driver) -> list[int]:
    """How many steps each step is until all is done."""
    found = []
    while driver.scheduler.has_work or driver.pending:
        driver.step()
        if driver.last_step:
            found.append(driver.last_step.num_steps)
    driver.run()
    driver.check_solo()
    return found


@pytest.mark.parametrize("overlap", [0, 1])
def test_as_far_as_the_first_to_reach_its_length(overlap):
    driver = Driver(**ROOMY, overlap=overlap, max_steps=4)
    steady(driver, max_tokens=12)
    assert sizes(driver) == [4, 4, 3]  # the first token came with the prompt


def test_the_context_is_a_length_too():
    driver = Driver(**ROOMY, overlap=0, max_steps=8, max_model_len=16)
    steady(driver, count=1, max_tokens=None)
    assert sizes(driver) == [8, 2]


def test_no_further_than_a_block():
    driver = Driver(num_blocks=200, block_size=2, overlap=0, max_steps=8)
    steady(driver, max_tokens=7)
    assert sizes(driver) == [2, 2, 2]


@settings(max_examples=50)
@given(
    block_size=st.sampled_from([1, 2, 4, 8]),
    max_steps=st.integers(2, 20),
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=3),
    max_tokens=st.integers(1, 30),
    spare=st.integers(0, 9),
    overlap=st.integers(0, 1),
)
def test_any_size_of_blocks_and_number_of_steps(block_size, max_steps, lengths, max_tokens, spare, overlap):
    """Blocks are there before a row comes to them, one a row at most, and each gets the tokens of single steps."""
    num_blocks = -(-(max(lengths) + max_tokens) // block_size) + spare
    options = {"num_blocks": num_blocks, "block_size": block_size, "overlap": overlap, "max_num_batched_tokens": 64}
    driver = Driver(**options, max_steps=max_steps)
    for i, length in enumerate(lengths):
        driver.add(f"r{i}", prompt_of(length, i), max_tokens=max_tokens - i % 2 or None)
    while driver.scheduler.has_work or driver.pending:
        driver.step()
        step = driver.last_step
        if step and step.num_steps > 1:
            assert step.num_steps <= min(max_steps, block_size)
            assert max(Counter(slot for slot, *_ in step.new_blocks).values(), default=0) <= 1
    driver.run()
    driver.check_solo()


def test_an_end_in_the_middle_ends_it_for_all():
    """The second token after the prompt is one row's last: the other keeps what it got, and the blocks come back."""
    driver = Driver(**ROOMY, overlap=0, max_steps=8)
    steady(driver, count=1, max_tokens=30)
    driver.run()
    eos = driver.streamed["r0"][2]
    assert eos not in driver.streamed["r0"][:2]
    driver = Driver(**ROOMY, overlap=0, max_steps=8)
    driver.add("r0", prompt_of(5), max_tokens=30, eos=[eos])
    driver.add("other", prompt_of(7, 1), max_tokens=30)
    driver.step()
    driver.step()
    assert driver.last_step.num_steps == 8 and "r0" in driver.finished
    other = driver.requests["other"]
    assert len(driver.streamed["other"]) == 3 and other.num_computed_tokens == 9
    assert len(other.block_ids) == 2 == driver.manager.num_used_blocks
    driver.run()
    driver.check_solo()


def test_few_blocks_make_it_short_and_nobody_is_preempted_for_it():
    driver = Driver(num_blocks=4, block_size=8, overlap=0, max_steps=8, max_num_batched_tokens=64)
    steady(driver, max_tokens=17)  # 5 + 17 tokens each: three blocks, of which there are not six
    driver.step()
    assert driver.last_step.num_steps == 8 and driver.manager.num_available_blocks == 0
    driver.step()
    assert driver.last_step.num_steps == 3, "to the end of the blocks"
    assert driver.scheduler.num_preemptions == 0
    driver.run()
    driver.check_solo()


@pytest.mark.parametrize(
    "other",
    [
        {"logprobs": 2},
        {"n": 1, "best_of": 2, "output_kind": "final"},
        {"use_beam_search": True, "beam_width": 2},
    ],
)
def test_single_where_the_host_is_needed(other):
    driver = Driver(**ROOMY, overlap=0, max_steps=4)
    steady(driver, max_tokens=9)
    driver.add("other", prompt_of(6, 9), max_tokens=9, **other)
    together = 0
    while driver.scheduler._requests.get("other"):
        driver.step()
        assert driver.last_step.num_steps == 1
        together += 1
    assert together >= 9


def test_who_comes_meanwhile_is_next():
    driver = Driver(**ROOMY, overlap=1, max_steps=8)
    steady(driver, max_tokens=40)
    step_until(driver, lambda: driver.last_step and driver.last_step.num_steps == 8)
    driver.add("late", prompt_of(9, 5), max_tokens=3)
    driver.step()  # takes in what is on its way: where the rows go on is not known before
    assert driver.last_step is None
    driver.step()
    assert driver.last_step.num_steps == 1 and driver.last_step.admissions[0].request.request_id == "late"
    driver.run()
    driver.check_solo()


def test_it_goes_on_beside_those_for_whom_there_is_no_slot():
    driver = Driver(**ROOMY, overlap=0, max_steps=4, max_num_seqs=2)
    steady(driver, max_tokens=9)
    driver.add("waits", prompt_of(5, 8), max_tokens=2)
    assert sizes(driver)[:2] == [4, 4]


@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_an_abort_in_the_middle(num_host_blocks):
    driver = Driver(**ROOMY, overlap=1, max_steps=8, scheduler_options={"num_host_blocks": num_host_blocks})
    steady(driver, max_tokens=40)
    step_until(driver, lambda: driver.last_step and driver.last_step.num_steps == 8)
    driver.abort("r0")
    assert driver.requests["r0"].status is Status.FINISHED
    driver.add("new", driver.requests["r0"].all_token_ids, max_tokens=5)  # finds what was computed, and no more
    driver.run()
    driver.check_solo()


def test_a_prefix_is_hashed_as_far_as_its_tokens_are_known():
    driver = Driver(**ROOMY, overlap=1, max_steps=8)
    steady(driver, count=1, max_tokens=40)
    step_until(driver, lambda: driver.last_step and driver.last_step.num_steps == 8)
    request = driver.requests["r0"]
    assert request.num_computed_tokens > request.num_tokens
    assert request.num_registered_blocks <= request.num_tokens // driver.manager.block_size
    driver.run()
    assert driver.add("again", request.all_token_ids, max_tokens=2) and driver.step() is not None
    assert driver.requests["again"].num_cached_tokens == (request.num_tokens - 1) // 8 * 8
    driver.run()
    driver.check_solo()
