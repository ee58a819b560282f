"""How many decode steps may be one, so that nobody waits too long for what comes of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from jaxpaged.core.step import Step, StepResult

_WINDOW = 5  # of how many steps the median counts


class Pace:
    """Follows how long decode steps take, from one result to the next.

    Rows come with a step of another kind, and what was measured before it says nothing about those after it: so the
    first decode step that follows is always one.

    Args:
      max_steps: never more than so many.
      max_seconds: they take no longer together, by the median of the last ones, or by the very last one if that was
        slower: where a machine slows down, they are too long once. One step is always granted.
    """

    def __init__(self, max_steps: int, max_seconds: float, clock: Callable[[], float] = time.perf_counter):
        self._max_steps, self._max_seconds, self._clock = max_steps, max_seconds, clock
        self._seconds: deque[float] = deque(maxlen=_WINDOW)  # of one step each
        self._since = clock()
        self._num_others = 0  # steps of another kind that are under way

    @property
    def num_steps(self) -> int:
        """How many the next step may be."""
        if self._max_steps == 1 or not self._seconds:
            return 1
        seconds = max(sorted(self._seconds)[len(self._seconds) // 2], self._seconds[-1])
        return max(1, int(min(self._max_steps, self._max_seconds / max(seconds, 1e-9))))

    def launched(self, step: Step) -> None:
        """A step is under way."""
        if not _is_decode(step):
            self._num_others += 1
            self._seconds.clear()

    def collected(self, step: Step, result: StepResult) -> None:
        """A step's result is there."""
        now = self._clock()
        if not _is_decode(step):
            self._num_others -= 1
        elif not self._num_others:
            self._seconds.append((now - self._since) / result.num_steps)
        self._since = now


def _is_decode(step: Step) -> bool:
    return step.total_tokens == len(step.requests) and not step.admissions
