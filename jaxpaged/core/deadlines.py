"""Which requests have run out of time."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

from jaxpaged.core.request import Request, Status

_SPARE = 64  # entries of ended requests that are not worth clearing


class Deadlines:
    """A heap of the requests with a timeout. It costs nothing when nobody has one.

    Args:
      clock: gives seconds, as `Request.arrival_time` does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._heap: list[tuple[float, tuple, Request]] = []
        self._limit = _SPARE

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, request: Request) -> None:
        """Watches one sample, if it has a timeout."""
        if request.params.timeout is None:
            return
        heapq.heappush(self._heap, (request.arrival_time + request.params.timeout, request.sort_key, request))
        if len(self._heap) > self._limit:  # most may have ended long ago
            self._heap = [entry for entry in self._heap if entry[2].status is not Status.FINISHED]
            heapq.heapify(self._heap)
            self._limit = _SPARE + 2 * len(self._heap)

    def expired(self) -> list[Request]:
        """Live samples whose time is over, each once."""
        now, late = self._clock(), []
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if request.status is not Status.FINISHED:
                late.append(request)
        return late
