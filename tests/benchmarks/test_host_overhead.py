"""The benchmarks of the host, with few requests and steps; and that a device of 5 ms a step is never idle."""

import gc

import pytest

from benchmarks import host_overhead, long_prompt
from benchmarks.fake_device import FakeDevice, ThreadClock
from benchmarks.host_overhead import idle_share


@pytest.fixture
def no_garbage_collection():
    """A collection looks at all that the tests have imported, which in a serving process it does not."""
    gc.disable()
    yield
    gc.enable()


def test_the_fake_device_counts_what_comes_late():
    clock = ThreadClock()
    device = FakeDevice(100.0, clock)
    first, second = device.queue(), device.queue()
    assert second - first == pytest.approx(100) and device.idle_s == 0
    device.wait_until(second + 50)
    assert device.queue() == pytest.approx(second + 150, abs=5)
    assert device.idle_s == pytest.approx(50, abs=5) and device.busy_s == pytest.approx(300) and device.num_late == 1


@pytest.mark.parametrize("num_running", [64, 256])
@pytest.mark.parametrize("churn", [False, True])
def test_the_host_keeps_the_device_busy(num_running, churn, no_garbage_collection):
    """By a clock of CPU time, so that a busy machine does not count."""
    assert idle_share(num_running, 60, churn=churn, clock=ThreadClock()) < 0.01


def test_without_overlap_it_would_not(no_garbage_collection):
    assert idle_share(256, 20, churn=True, clock=ThreadClock(), overlap=False) > 0.03


def test_every_stage_is_measured():
    row = host_overhead.measure(8, 20, churn=True)
    assert row.keys() == host_overhead.COLUMNS.keys()
    assert 0 < row["total_ms"] < row["step_ms"]


def test_a_long_prompt_is_measured():
    rows = long_prompt.measure(20_000)
    assert all(row.keys() == long_prompt.COLUMNS.keys() for row in rows)
    new, cached = (row["rounds_to_first_token"] for row in rows)
    assert new == 4, "three chunks, and a round until the result is there"
    assert cached == 3, "the search takes two"
