"""Snapshots say what the scheduler's own books say."""

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.snapshot import CACHED, FIRST_OWNERS, FREE, MAX_WAITING, EngineSnapshot, block_map, snapshot
from tests.core.driver import Driver


def codes_of(snap: EngineSnapshot) -> list[int]:
    """The code of each block, from block 1 on."""
    width = len(snap.blocks) // snap.num_blocks
    return np.frombuffer(snap.blocks, np.dtype(f"<u{width}")).tolist()


def check(driver: Driver) -> EngineSnapshot:
    """A snapshot agrees with tables, prefix cache and queues."""
    snap, scheduler, pool = snapshot(driver.scheduler), driver.scheduler, driver.manager
    codes = codes_of(snap)
    assert len(codes) == snap.num_blocks == pool.num_blocks
    tables: dict[int, list[int]] = {i: [] for i in range(len(scheduler.running))}
    for block, code in enumerate(codes, start=1):
        for index in snap.owners[code - FIRST_OWNERS] if code >= FIRST_OWNERS else ():
            tables[index].append(block)
    assert tables == {i: sorted(r.block_ids) for i, r in enumerate(scheduler.running)}
    assert codes.count(FREE) == pool.num_free_blocks
    assert codes.count(CACHED) == snap.num_cached_blocks == pool.num_cached_blocks
    assert len(codes) - codes.count(FREE) - codes.count(CACHED) == snap.num_used_blocks == pool.num_used_blocks
    assert {b for b, code in enumerate(codes, start=1) if code == CACHED} <= set(pool.findable_blocks)
    assert len(set(map(tuple, snap.owners))) == len(snap.owners), "a set twice"
    assert set(codes) - {FREE, CACHED} == set(range(FIRST_OWNERS, FIRST_OWNERS + len(snap.owners))), "a set unused"
    assert all(owners == sorted(set(owners)) for owners in snap.owners)
    told = [(r.request_id, r.index, r.status, r.num_blocks) for r in snap.requests]
    expected = [(r.request_id, r.index, "running", len(r.block_ids)) for r in scheduler.running]
    expected += [(r.request_id, r.index, "waiting", 0) for r in scheduler.waiting]
    assert told == expected
    assert (snap.num_running, snap.num_waiting) == (scheduler.num_running, scheduler.num_waiting)
    for request in snap.requests:
        assert 0 <= request.num_cached_tokens < request.num_prompt_tokens
        assert request.num_prompt_tokens + request.num_output_tokens <= request.max_total_tokens
        assert 0 <= request.num_computed_tokens <= request.num_prompt_tokens + request.num_output_tokens
    return snap


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
REQUESTS = st.lists(
    st.tuples(PROMPTS, st.integers(1, 3), st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.integers(8, 24), st.booleans())
def test_it_agrees_with_the_books_at_every_step(requests, num_blocks: int, caching: bool) -> None:
    """Prompts of three tokens share prefixes, samples share prompts, and a small pool preempts."""
    driver = Driver(num_blocks=num_blocks, block_size=2, enable_prefix_caching=caching, max_model_len=16)
    check(driver)
    for number, (prompt, n, max_tokens, steps) in enumerate(requests):
        driver.add(f"r{number}", prompt, n=n, max_tokens=max_tokens, temperature=1.0)
        for _ in range(steps):
            driver.step()
            check(driver)
    while driver.scheduler.has_work or driver.pending:
        driver.step()
        check(driver)
    assert not check(driver).owners


def test_a_shared_prefix_is_one_set() -> None:
    driver = Driver(num_blocks=32, block_size=4, max_num_batched_tokens=64)
    prefix = list(range(8))
    driver.add("a", [*prefix, 50], max_tokens=4)
    driver.step()
    driver.add("b", [*prefix, 60], max_tokens=4)
    driver.add("c", [*prefix, 70], max_tokens=4)
    driver.step()
    snap = check(driver)
    counts = Counter(tuple(snap.owners[code - FIRST_OWNERS]) for code in codes_of(snap) if code >= FIRST_OWNERS)
    assert counts == {(0, 1, 2): 2, (0,): 1, (1,): 1, (2,): 1}
    assert [r.num_cached_tokens for r in snap.requests] == [0, 8, 8]


def test_a_preempted_request_waits_and_owns_nothing() -> None:
    driver = Driver(num_blocks=6, block_size=2, max_model_len=12, enable_prefix_caching=False)
    driver.add("first", [1, 2, 3], max_tokens=8)
    driver.add("second", [4, 5, 6], max_tokens=8)
    seen = []
    while driver.scheduler.has_work or driver.pending:
        driver.step()
        seen += [r for r in check(driver).requests if r.num_preemptions]
    assert {(r.request_id, r.status, r.num_blocks) for r in seen} >= {("second", "waiting", 0)}


def test_waiting_requests_are_bounded_but_counted() -> None:
    driver = Driver(num_blocks=8, block_size=2, max_num_seqs=1)
    for i in range(MAX_WAITING + 20):
        driver.add(f"r{i}", [1], max_tokens=1)
    snap = snapshot(driver.scheduler)
    assert (len(snap.requests), snap.num_waiting) == (MAX_WAITING, MAX_WAITING + 20)


def test_it_tells_no_token() -> None:
    """Nothing of it depends on what the tokens are."""

    def taken(token: int) -> EngineSnapshot:
        driver = Driver(num_blocks=8, block_size=2)
        driver.add("r", [token] * 5, max_tokens=3)
        driver.step()
        return snapshot(driver.scheduler)

    one, other = taken(1), taken(999)
    assert (one.owners, one.blocks) == (other.owners, other.blocks)
    fields = type(one.requests[0]).__struct_fields__
    assert [getattr(one.requests[0], f) for f in fields if f != "age"] == [
        getattr(other.requests[0], f) for f in fields if f != "age"
    ]


def test_the_map_is_as_wide_as_it_must_be() -> None:
    owners, blocks = block_map(300, [[i] for i in range(1, 255)])
    assert (len(owners), len(blocks)) == (254, 300)
    owners, blocks = block_map(300, [[i] for i in range(1, 256)])
    assert (len(owners), len(blocks)) == (255, 600)
    assert blocks[-2:] == b"\x00\x00" and blocks[508:510] == (256).to_bytes(2, "little")


@pytest.mark.usefixtures("frozen_heap")
def test_large_pools_are_quick() -> None:
    """100,000 blocks, all in use, a prefix of them shared by 256 requests."""
    shared, own = list(range(1, 65)), list(range(65, 100_001))
    per = len(own) // 256
    tables = [[*shared, *own[i * per : (i + 1) * per]] for i in range(256)]
    begin = time.thread_time()
    owners, blocks = block_map(100_000, tables, range(1, 65))
    seconds = time.thread_time() - begin
    assert len(owners) == 257 and len(blocks) == 200_000
    assert seconds < 0.25  # of the CPU: 10 ms as a rule
