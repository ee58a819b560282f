"""Who goes first, who gives way, and who is not let in."""

import random

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.core.policy import policy_key
from jaxpaged.errors import QueueFullError
from tests.core.driver import Driver
from tests.core.steps import prompt_of


def by_priority(request):
    return request.priority


def test_waiting_requests_start_in_order_of_their_keys():
    driver = Driver(num_blocks=40, block_size=4, max_num_seqs=1, scheduler_options={"key": by_priority})
    for name, priority in (("c", 2), ("a", 0), ("d", 2), ("b", 1)):
        driver.add(name, [1, 2], max_tokens=3, priority=priority)
    driver.run()
    assert list(driver.finished) == ["a", "b", "c", "d"]
    driver.check_solo()


@pytest.mark.parametrize("num_host_blocks", [0, 50])
def test_the_least_urgent_is_preempted_though_it_came_first(num_host_blocks):
    options = {"key": by_priority, "num_host_blocks": num_host_blocks}
    driver = Driver(num_blocks=8, block_size=4, max_num_batched_tokens=32, scheduler_options=options)
    last = driver.add("last", prompt_of(6), max_tokens=20, priority=5)
    for _ in range(3):
        driver.step()
    urgent = [driver.add(f"u{i}", prompt_of(6, i), max_tokens=14, priority=i) for i in range(2)]
    driver.run()
    driver.check_solo()
    assert last.num_preemptions and urgent[0].num_preemptions == 0
    assert list(driver.finished)[-1] == "last"


def test_samples_keep_their_requests_place():
    driver = Driver(num_blocks=40, block_size=4, max_num_seqs=2, scheduler_options={"key": by_priority})
    driver.add("b", [1, 2], n=3, max_tokens=4, priority=1)
    driver.add("a", [1, 3], n=3, max_tokens=4, priority=0)
    driver.run()
    driver.check_solo()
    assert max(map(list(driver.finished).index, ("a", "a#1", "a#2"))) < list(driver.finished).index("b#1")


@pytest.mark.parametrize(("ageing", "starves"), [(5.0, False), (0.0, True)])
def test_ageing_lets_the_least_urgent_finish(ageing, starves):
    """B61: more urgent requests arrive without end."""
    key = policy_key(EngineConfig(scheduling_policy="priority", ageing=ageing))
    driver = Driver(num_blocks=40, block_size=4, max_num_seqs=1, scheduler_options={"key": key})
    driver.add("u", [3], max_tokens=4, priority=0)
    driver.add("low", [1, 2], max_tokens=2, priority=3)
    for i in range(150):
        driver.add(f"u{i}", [1, 2, 3], max_tokens=4, priority=0)
        driver.step()
    assert ("low" not in driver.finished) == starves
    driver.run()
    driver.check_solo()


def test_random_keys_change_no_output():
    rng = random.Random(3)
    driver = Driver(
        num_blocks=12,
        block_size=4,
        max_num_batched_tokens=12,
        scheduler_options={"key": lambda request: rng.random(), "num_host_blocks": 6},
    )
    for i in range(30):
        driver.add(f"r{i}", prompt_of(rng.randint(1, 20), i), max_tokens=rng.randint(1, 20), n=rng.choice([1, 1, 3]))
        driver.step()
    driver.run()
    driver.check_solo()
    assert driver.scheduler.num_preemptions


# A full queue


def test_a_full_queue_refuses_and_disturbs_nobody():
    driver = Driver(num_blocks=40, block_size=4, max_num_seqs=1, scheduler_options={"max_num_queued_requests": 3})
    for i in range(3):
        driver.add(f"r{i}", [1, i], max_tokens=3)
    with pytest.raises(QueueFullError, match=r"3 requests wait already, and at most 3 may"):
        driver.add("r3", [1, 3], max_tokens=3)
    driver.step()
    driver.add("r3", [1, 3], max_tokens=3)  # one has started
    with pytest.raises(QueueFullError):
        driver.add("r4", [1, 3], max_tokens=3)
    driver.run()
    driver.check_solo()
    assert list(driver.finished) == ["r0", "r1", "r2", "r3"]


def test_each_sample_counts_but_an_empty_queue_takes_any_request():
    driver = Driver(num_blocks=40, block_size=4, max_num_seqs=2, scheduler_options={"max_num_queued_requests": 3})
    driver.add("big", [1, 2], n=6, max_tokens=3)
    with pytest.raises(QueueFullError):
        driver.add("a", [1], max_tokens=3)
    driver.run()
    driver.add("a", [1], max_tokens=3)
    with pytest.raises(QueueFullError):
        driver.add("b", [1], n=3, max_tokens=3)
    driver.add("c", [1], n=2, max_tokens=3)
    driver.run()
    driver.check_solo()


def test_a_preempted_request_is_never_refused():
    driver = Driver(num_blocks=6, block_size=4, max_num_seqs=3, scheduler_options={"max_num_queued_requests": 1})
    for i in range(3):
        driver.add(f"r{i}", [1, i], max_tokens=18)
        driver.step()
    driver.run()
    driver.check_solo()
    assert driver.scheduler.num_preemptions and len(driver.finished) == 3
