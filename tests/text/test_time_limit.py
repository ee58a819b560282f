"""Time limits end what runs on, and nothing else."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

import pytest

from jaxpaged.text.time_limit import within


def loop() -> None:
    while True:
        with contextlib.suppress(Exception):
            sum(range(10))


def test_what_runs_on_is_ended_in_any_thread() -> None:
    errors = []

    def run() -> None:
        try:
            within(0.05, loop)
        except TimeoutError as e:
            errors.append(e)

    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert len(errors) == 2 and "0.05 s" in str(errors[0])


def test_what_ends_in_time_or_fails_is_left_alone() -> None:
    assert within(5, lambda: 1) == 1
    with pytest.raises(KeyError):
        within(5, lambda: {}["a"])


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clocks of threads here")
def test_waiting_does_not_count() -> None:
    """Such as for a processor."""
    assert within(0.1, lambda: time.sleep(0.5) or 1) == 1

    def late() -> None:
        time.sleep(0.2)
        loop()

    with pytest.raises(TimeoutError):
        within(0.1, late)


def test_a_limit_that_comes_at_the_end_reaches_nobody_else() -> None:
    def spin(seconds: float) -> None:
        deadline = time.thread_time() + seconds
        while time.thread_time() < deadline:
            pass

    ended, interval = 0, sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that the limit comes while the function runs
    try:
        for i in range(200):
            try:
                within(0.001, lambda seconds=0.0008 + i % 8 * 1e-4: spin(seconds))
            except TimeoutError:
                ended += 1
            sum(range(1000))  # a stray exception would come here
    finally:
        sys.setswitchinterval(interval)
    assert 0 < ended < 200, "some ended before, some at the limit"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_limit_that_is_ignored_where_it_comes_is_over() -> None:
    """Python ignores whatever a destructor raises."""

    class Slow:
        def __del__(self) -> None:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                pass

    begin = time.monotonic()
    assert within(0.05, lambda: Slow() and 1) == 1
    assert time.monotonic() - begin < 10
    sum(range(1000))
