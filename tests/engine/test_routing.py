"""Which core a request goes to: balanced, with affinity to prefixes, in bounded memory."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.engine import routing
from jaxpaged.engine.routing import BLOCK_TOKENS, SLACK, SLACK_SHARE, Router

PREFIX = list(range(4 * BLOCK_TOKENS))


def prompt(seed: int, length: int = 2 * BLOCK_TOKENS) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def most(least: int) -> float:
    """Live requests that a core may have when the least busy one has `least`."""
    return least + max(SLACK, SLACK_SHARE * least) + 1


operations = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2), st.booleans()), max_size=150)


@given(cores=st.integers(1, 5), steps=operations)
@settings(deadline=None)
def test_no_core_is_ever_much_busier_than_another(cores, steps) -> None:
    """Whatever is asked: prompts of few and of many prefixes, and requests that end in any order."""
    router, live = Router(cores), []
    for seed, blocks, ends in steps:
        if ends and live:
            core = live.pop(seed % len(live))
            router.ended(core)
        before = list(router.loads)
        core = router.route(prompt(seed, blocks * BLOCK_TOKENS + 3))
        live.append(core)
        assert before[core] + 1 <= most(min(before))
    assert sum(router.loads) == len(live) and all(router.loads[c] == live.count(c) for c in range(cores))


@given(cores=st.integers(2, 5), count=st.integers(1, 60))
@settings(deadline=None)
def test_unrelated_prompts_go_round(cores, count) -> None:
    router = Router(cores)
    for seed in range(count):
        router.route(prompt(1000 + seed))
    assert max(router.loads) - min(router.loads) <= 1


def test_no_core_is_left_out_when_requests_come_one_at_a_time() -> None:
    router, chosen = Router(3), []
    for seed in range(30):
        chosen.append(router.route(prompt(seed)))
        router.ended(chosen[-1])
    assert {chosen.count(core) for core in range(3)} == {10}


def test_the_longest_known_prefix_wins() -> None:
    router = Router(2)
    first = router.route(PREFIX[: 2 * BLOCK_TOKENS])
    other = router.route([*PREFIX[:BLOCK_TOKENS], *prompt(1, 2 * BLOCK_TOKENS)])  # the first block is known
    assert other == first
    for tail in range(SLACK - 1):
        assert router.route([*PREFIX, tail]) == first
    assert router.route(prompt(2)) != first


def test_a_busy_home_is_left_and_the_prefix_gets_a_second_one() -> None:
    router = Router(2)
    chosen = [router.route(PREFIX) for _ in range(100)]
    assert set(chosen) == {0, 1} and abs(chosen.count(0) - chosen.count(1)) <= most(50) - 50


def test_salts_and_short_prompts_share_nothing() -> None:
    router = Router(8)
    first = router.route(PREFIX, "ours")
    assert router.route(PREFIX, "ours") == first
    assert router.route(PREFIX, "theirs") != first and router.route(PREFIX) != first
    assert router.route(PREFIX[: BLOCK_TOKENS - 1], "ours") != first


def test_memory_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(routing, "MAX_PREFIXES", 50)
    router = Router(2)
    kept = router.route(PREFIX)
    for seed in range(200):
        router.ended(router.route(prompt(seed)))
        assert router.route(PREFIX) == kept  # used all the time, so it stays
        router.ended(kept)
        assert len(router._homes) <= 50
    router.ended(router.route(list(range(10 * routing.MAX_BLOCKS * BLOCK_TOKENS))))
    assert len(router._homes) <= 50
