"""Warm-up: what is waited for, what comes later, and in which order."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpaged.device import warm_up
from jaxpaged.device.buckets import Bucket, BucketTable
from jaxpaged.device.warm_up import WarmUp

BUCKETS = BucketTable([1, 4], [4, 16, 32], max_num_seqs=4)


class Parts:
    """Stands in for a runner: compiling is writing a name down."""

    buckets = BUCKETS

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.padded: list[Bucket] = []
        self.look: Callable[[Bucket], None] = lambda _: None
        self.warming: WarmUp | None = None

    def bucket_programs(self, buckets: Sequence[Bucket]) -> list[Callable[[], Any]]:
        return [lambda bucket=bucket: self._compile(bucket) for bucket in buckets]

    def other_programs(self) -> list[Callable[[], Any]]:
        return [lambda: self.compiled.append("other")]

    def run_padding(self, buckets: Sequence[Bucket]) -> None:
        self.padded += buckets

    def _compile(self, bucket: Bucket) -> None:
        self.look(bucket)
        self.compiled.append(bucket)


@pytest.fixture
def threads(monkeypatch) -> list[Callable[[], None]]:
    """What threads that were started would run."""
    started: list[Callable[[], None]] = []

    def timer(seconds: float, target: Callable[..., None], args: tuple[Any, ...]) -> Any:
        assert seconds == warm_up._PAUSE > 0, "the first request has the machine for itself"
        return SimpleNamespace(start=lambda: started.append(functools.partial(target, *args)))

    monkeypatch.setattr("jaxpaged.device.warm_up.threading.Timer", timer)
    monkeypatch.setattr("jaxpaged.device.warm_up._NICE", 0)  # it is this thread that runs them here
    return started


def test_small_buckets_are_used_as_they_are_compiled(threads):
    """Warm-up that is gradual waits for one that all rows fit; then a thread goes on, and steps take what there is."""
    parts = Parts()
    warming = WarmUp(parts, gradually=True)
    small, middle, large = BUCKETS.mixed
    warming.finish()
    assert {*parts.compiled} == {middle, "other"} and len(parts.compiled) == 2
    assert not parts.padded, "a CPU has nothing to load"
    assert [BUCKETS.pick(*step, warming.unready) for step in [(1, 1), (4, 4), (1, 9), (4, 16)]] == [middle] * 4
    assert BUCKETS.mixed_tokens(warming.unready) == [middle.tokens], "prompts are cut for what is there"
    (go_on,) = threads

    def look(bucket: Bucket) -> None:
        assert bucket in warming.unready, "nobody may pick it before it is compiled"

    parts.look = look
    go_on()
    assert parts.compiled[2:] == [large, BUCKETS.decode[-1], BUCKETS.decode[0], small], "what does most first"
    assert not warming.unready
    assert BUCKETS.pick(1, 1, warming.unready).tokens == 1


def test_a_bucket_that_cannot_be_compiled_is_never_used(threads):
    """The engine can do without, and the others come nevertheless."""
    parts = Parts()
    warming = WarmUp(parts, gradually=True)
    warming.finish()
    bad = BUCKETS.mixed[0]

    def look(bucket: Bucket) -> None:
        if bucket == bad:
            raise MemoryError

    parts.look = look
    threads[0]()
    assert warming.unready == (bad,) and BUCKETS.pick(1, 2, warming.unready) == BUCKETS.mixed[1]
    assert BUCKETS.decode[0] in parts.compiled


def test_what_is_compiled_runs_on_padding_while_nobody_asks(threads):
    """Each once, smallest first, as they are compiled; what cannot be compiled is not waited for."""
    parts = Parts()
    warming = WarmUp(parts, gradually=True)
    warming.finish()
    small, middle, large = BUCKETS.mixed

    def look(bucket: Bucket) -> None:
        assert warming.use_one(parts), "a thread goes on"
        if bucket == small:
            raise MemoryError

    parts.look = look
    assert warming.use_one(parts) and not parts.padded, "smaller ones come"
    threads[0]()
    assert parts.padded == BUCKETS.decode[:1], "the only one that all smaller ones were compiled of"
    while warming.use_one(parts):
        pass
    assert parts.padded == [*BUCKETS.decode, middle, large]
    assert not warming.use_one(parts) and len(parts.padded) == 4


def test_all_at_once_leaves_all_of_it_to_idle_time(threads):
    parts = Parts()
    warming = WarmUp(parts)
    warming.finish()
    assert [warming.use_one(parts) for _ in BUCKETS.all] == [True] * 4 + [False]
    assert parts.padded == sorted(BUCKETS.all)


def test_where_a_run_takes_long_larger_ones_are_left_to_requests(threads, monkeypatch):
    """A request that comes meanwhile waits, and so does the watchdog."""
    parts = Parts()
    warming = WarmUp(parts)
    warming.finish()
    monkeypatch.setattr(warm_up, "_LONGEST", -1.0)
    assert not warming.use_one(parts) and not warming.use_one(parts)
    assert parts.padded == [BUCKETS.decode[0]]


def test_it_lets_go_of_the_runner(threads):
    """Else weights and pool would stay until a garbage collection."""
    parts = Parts()
    parts.warming = warming = WarmUp(parts)
    warming.finish()
    gone = weakref.ref(parts)
    gc.disable()
    try:
        del parts
        assert gone() is None
    finally:
        gc.enable()


def test_an_error_of_what_is_waited_for_is_raised(threads):
    parts = Parts()

    def look(bucket: Bucket) -> None:
        raise MemoryError(str(bucket))

    parts.look = look
    with pytest.raises(MemoryError):
        WarmUp(parts).finish()
    assert not threads


def test_progress_is_told_program_by_program(threads):
    told: list[tuple[int, int]] = []
    WarmUp(Parts()).finish(lambda done, total: told.append((done, total)))
    assert told == [(i, 6) for i in range(7)] and not threads, "all were waited for"
