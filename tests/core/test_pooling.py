"""Requests for a vector, in the scheduler: as if alone, whatever runs beside them, and nothing is left behind."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpaged.errors import RequestTooLargeError
from tests.core.driver import Driver
from tests.core.simulated_device import hidden_state

LENGTHS = [1, 4, 8, 9, 17, 40]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [2 + (seed * 7 + i * i) % 900 for i in range(length)]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("tokens", [4, 5, 16, 100])
@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_any_chunking_beside_any_request(pooling, tokens, overlap):
    """B52: the last chunk may be a single token, which goes with those of decodes."""
    driver = Driver(num_blocks=64, block_size=4, max_num_batched_tokens=tokens, overlap=overlap)
    driver.add("text", prompt(3), max_tokens=20)
    for n in LENGTHS:
        driver.add(f"v{n}", prompt(n), pooling=pooling)
    driver.run()
    driver.check_solo()
    assert all(not update.new_token_ids for name, update in driver.finished.items() if name != "text")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_rows_of_vectors_sample_nothing(pooling):
    driver = Driver(num_blocks=64, block_size=4, overlap=0, max_num_batched_tokens=4)
    driver.add("v", prompt(9), pooling=pooling)
    sizes = []
    while driver.scheduler.has_work:
        driver.step()
        sizes.append((driver.last_step.num_tokens, driver.last_step.samples))
    assert sizes[-1] == ([1], [False]) and not any(any(samples) for _, samples in sizes)


def test_a_prefix_that_is_cached_is_read_for_the_last_token_only():
    driver = Driver(num_blocks=64, block_size=4, overlap=0)
    driver.add("text", prompt(17), max_tokens=1)
    driver.run()
    for pooling, cached in (("last", 16), ("mean", 0), ("last", 16)):
        driver.add(pooling + str(driver.now), prompt(17), pooling=pooling)
        driver.run()
        assert list(driver.finished.values())[-1].num_cached_tokens == cached
    driver.check_solo()


def test_a_vector_leaves_its_prefix_to_others():
    driver = Driver(num_blocks=64, block_size=4, overlap=0)
    driver.add("v", prompt(17), pooling="mean")
    driver.run()
    driver.add("text", prompt(17), max_tokens=2)
    driver.run()
    assert driver.finished["text"].num_cached_tokens == 16
    driver.check_solo()


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("host_blocks", [0, 3, 100], ids=["recompute", "swap some", "swap all"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("tokens", [2, 3])
def test_preempted_in_the_middle_of_a_prompt(pooling, overlap, host_blocks, caching, tokens):
    """Each position is summed up once, though it may be computed twice."""
    driver = Driver(
        num_blocks=12,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=tokens,
        overlap=overlap,
        enable_prefix_caching=caching,
        scheduler_options={"num_host_blocks": host_blocks},
    )
    driver.add("text", prompt(6, 3), max_tokens=40)
    driver.add("v", prompt(30), pooling=pooling)
    driver.run()
    assert driver.requests["v"].num_preemptions >= 1, "the pool is too large to test anything"
    driver.check_solo()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_whole_context_and_the_whole_pool_are_there_for_the_prompt(pooling):
    driver = Driver(num_blocks=4, block_size=4, max_model_len=16)
    driver.add("v", prompt(16), pooling=pooling)
    with pytest.raises(RequestTooLargeError, match=r"has 17 tokens; the context of 16 leaves room for 16"):
        driver.add("longer", prompt(17), pooling=pooling)
    with pytest.raises(RequestTooLargeError):
        driver.add("text", prompt(16))
    driver.run()
    driver.check_solo()
    small = Driver(num_blocks=4, block_size=4, max_model_len=100)
    with pytest.raises(RequestTooLargeError, match="17 tokens need 5 blocks"):
        small.add("v", prompt(17), pooling=pooling)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_aborted_at_any_time(overlap, steps):
    driver = Driver(num_blocks=64, block_size=4, max_num_batched_tokens=8, overlap=overlap)
    driver.add("v", prompt(20), pooling="mean")
    for _ in range(steps):
        driver.step()
    driver.abort("v")
    driver.add("after", prompt(20), pooling="mean")
    driver.run()
    driver.check_solo("after")
    assert driver.finished["v"].embedding is None or driver.finished["v"].finish_reason == "stop"


def test_no_vector_of_what_is_not_finite(monkeypatch):
    """It ends with an error, its neighbour is as ever, and what its blocks hold is found by nobody."""
    driver = Driver(num_blocks=64, block_size=4, overlap=0, max_num_batched_tokens=64)
    driver.add("v", prompt(9), pooling="mean")
    driver.add("fine", prompt(9, 5), pooling="mean")
    step = driver.scheduler.schedule()
    driver.device.launch(step)
    result = driver.device.sample_rows(step, {})
    result.pooled[0] = np.full_like(hidden_state(0), np.nan)
    bad, fine = driver.scheduler.update(step, result)
    assert (bad.request_id, bad.finish_reason, bad.embedding) == ("v", "error", None)
    assert "NaN" in bad.stop_reason and fine.embedding is not None
    driver.add("again", prompt(9), pooling="last")
    driver.run()
    assert driver.finished["again"].num_cached_tokens == 0
