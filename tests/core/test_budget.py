"""How prompts share steps with decodes and with each other, and where they are cut."""

import pytest

from jaxpaged.core.step_sizes import StepSizes
from tests.core.driver import Driver
from tests.core.steps import prompt_of, rows_of, step_until


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
def make_padded_by(give_sizes, tokens=64, **options):
    return Driver(
        num_blocks=400,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=tokens,
        max_model_len=200,
        scheduler_options={"step_sizes": StepSizes(give_sizes)},
        **options,
    )


def make_padded(*sizes, **options):
    return make_padded_by(lambda: sizes, **options)


def test_no_step_is_larger_than_the_largest_shape_there_is():
    sizes = [16]
    driver = make_padded_by(lambda: sizes)
    driver.add("long", prompt_of(60), max_tokens=20)
    driver.add("other", prompt_of(50, 1), max_tokens=20)
    driver.step()
    short = driver.add("short", prompt_of(3, 2), max_tokens=2)
    step_until(driver, lambda: short.num_output_tokens, limit=4)
    for _ in range(2):
        driver.step()
        assert driver.last_step.total_tokens == 16
    sizes.append(64)
    driver.step()
    assert driver.last_step.total_tokens > 16
    driver.run()
    driver.check_solo()


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
