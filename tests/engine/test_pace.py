"""How many steps may be one, by a clock of our own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.step import Step, StepResult
from jaxpaged.engine.pace import Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def collect(pace: Pace, clock: Clock, seconds: float, *, rows: int = 2, tokens: int = 2, steps: int = 1) -> None:
    step = Step(requests=[None] * rows, total_tokens=tokens)
    pace.launched(step)
    clock.now += seconds
    pace.collected(step, StepResult([], num_steps=steps))


def test_one_until_a_step_has_been_timed():
    clock = Clock()
    pace = Pace(8, 0.05, clock)
    assert pace.num_steps == 1
    collect(pace, clock, 3.0, tokens=40)  # a prompt, after a pause
    assert pace.num_steps == 1
    collect(pace, clock, 0.0099)
    assert pace.num_steps == 5


@pytest.mark.parametrize(("seconds", "expected"), [(0.001, 8), (0.0061, 8), (0.0099, 5), (0.026, 1), (0.7, 1)])
def test_as_many_as_fit_the_bound(seconds, expected):
    clock = Clock()
    pace = Pace(8, 0.05, clock)
    for _ in range(3):
        collect(pace, clock, seconds)
    assert pace.num_steps == expected
    assert expected == 1 or expected * seconds <= 0.05


def test_the_time_of_several_is_shared():
    clock = Clock()
    pace = Pace(8, 0.05, clock)
    collect(pace, clock, 0.079, steps=8)
    assert pace.num_steps == 5


def test_one_slow_step_matters_once_and_a_few_for_longer():
    clock = Clock()
    pace = Pace(8, 0.05, clock)
    for _ in range(5):
        collect(pace, clock, 0.005)
    collect(pace, clock, 2.0)
    assert pace.num_steps == 1
    collect(pace, clock, 0.005)
    assert pace.num_steps == 8
    for _ in range(3):
        collect(pace, clock, 0.04)
    collect(pace, clock, 0.005)
    assert pace.num_steps == 1


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=20), st.floats(0.001, 0.06))
def test_where_the_machine_flips_the_bound_is_missed_at_most_once(speeds, fast):
    """A machine that is 2.3 times as slow at times, for as many steps at once as are granted."""
    clock = Clock()
    pace = Pace(64, 0.05, clock)
    collect(pace, clock, fast)
    for is_slow, count in speeds:
        each, late = (2.3 if is_slow else 1.0) * fast, 0
        for _ in range(count):
            steps = pace.num_steps
            late += steps > 1 and steps * each > 0.05 * (1 + 1e-9)
            assert steps * each <= 2.3 * 0.05 * (1 + 1e-9) or steps == 1
            collect(pace, clock, steps * each, steps=steps)
        assert late <= 1


def test_newcomers_make_what_was_measured_void():
    clock = Clock()
    pace = Pace(8, 0.05, clock)
    collect(pace, clock, 0.005)
    assert pace.num_steps == 8
    collect(pace, clock, 0.005, rows=3, tokens=30)
    assert pace.num_steps == 1


def test_newcomers_count_from_their_launch_although_it_overlaps():
    """As the engine does: the next step is scheduled before the result of the one before it is there."""
    clock = Clock()
    pace = Pace(8, 0.05, clock)
    collect(pace, clock, 0.002)
    decode, mixed = Step(requests=[None], total_tokens=1), Step(requests=[None] * 200, total_tokens=900)
    pace.launched(decode)
    pace.launched(mixed)
    assert pace.num_steps == 1
    clock.now += 0.002
    pace.collected(decode, StepResult([]))
    assert pace.num_steps == 1, "200 rows may take longer than one"
    clock.now += 0.1
    pace.collected(mixed, StepResult([]))
    assert pace.num_steps == 1
    collect(pace, clock, 0.02, rows=200, tokens=200)
    assert pace.num_steps == 2


def test_it_can_be_switched_off():
    clock = Clock()
    pace = Pace(1, 1e6, clock)
    collect(pace, clock, 0.001)
    assert pace.num_steps == 1
