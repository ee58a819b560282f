"""Who comes in: what prefixes save, and that the search for them holds up nobody."""

import pytest

from jaxpaged.core.prefix_cache import sha256
from tests.core.driver import Driver
from tests.core.steps import prompt_of, rows_of


def test_salts_do_not_mix():
    """B63"""
    driver = Driver(num_blocks=60, block_size=4, max_num_batched_tokens=64)
    for i, salt in enumerate([None, "A", "B", "A", None]):
        driver.add(f"r{i}", prompt_of(40), max_tokens=3, cache_salt=salt, n=2)
        driver.run()
    driver.check_solo()
    assert [driver.finished[f"r{i}"].num_cached_tokens for i in range(5)] == [0, 0, 0, 36, 36]


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
