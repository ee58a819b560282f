"""The live requests: who runs, in which slot, and who waits, in what order."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from jaxpaged.core.request import Request, Status

_sort_key = attrgetter("sort_key")


class Roster:
    """Two queues in order of the requests' sort keys.

    A live request is in `running`, with a slot; in `waiting`; or *parked*: in neither, because something else has to
    happen before anything can be done for it.

    Args:
      num_slots: most requests that run at once.

    Attributes:
      samples: the live samples (of a beam search: beams) of each request, by its id.
      num_live: how many these are.
      num_wanting_logprobs, num_grammars, num_beams, num_pooled: how many of them want log-probabilities, have a
        grammar, are beams, want a vector.
    """

    def __init__(self, num_slots: int):
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.samples: dict[str, list[Request]] = {}
        self.num_live = self.num_wanting_logprobs = self.num_grammars = self.num_beams = self.num_pooled = 0
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        """How many more requests could run."""
        return len(self._free_slots)

    def enter(self, request: Request) -> None:
        """A new sample, parked."""
        self.samples.setdefault(request.request_id, []).append(request)
        self._count(request, 1)

    def queue(self, request: Request) -> None:
        """From parked to waiting."""
        assert request.status is Status.WAITING, request.request_id
        insort(self.waiting, request, key=_sort_key)

    def park(self, request: Request) -> None:
        """From waiting to parked."""
        self._remove(self.waiting, request)

    def seat(self, request: Request) -> None:
        """From waiting to running: it gets a slot."""
        self._remove(self.waiting, request)
        insort(self.running, request, key=_sort_key)
        request.status = Status.RUNNING
        request.slot = self._free_slots.pop()

    def unseat(self, request: Request) -> None:
        """From running to parked: its slot is free."""
        self._remove(self.running, request)
        self._free_slots.append(request.slot)
        request.status = Status.WAITING
        request.slot = -1

    def leave(self, request: Request) -> None:
        """A sample without a slot is live no more."""
        self._remove(self.waiting, request)
        samples = self.samples[request.request_id]
        samples.remove(request)
        if not samples:
            del self.samples[request.request_id]
        request.status = Status.FINISHED
        self._count(request, -1)

    def check_invariants(self) -> None:
        """Raises AssertionError unless queues, slots and counts agree."""
        live = [request for samples in self.samples.values() for request in samples]
        assert all(request.request_id == name for name, samples in self.samples.items() for request in samples)
        queued = self.running + self.waiting
        assert len(set(live)) == len(live) == self.num_live, "live requests miscounted"
        assert len(set(queued)) == len(queued) and set(queued) <= set(live), "in two queues, or in one and not live"
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_sort_key), "out of order"
        slots = [r.slot for r in self.running] + self._free_slots
        assert sorted(slots) == list(range(self._num_slots)), "a slot is lost or taken twice"
        for request in live:
            runs = request in self.running
            assert request.status is (Status.RUNNING if runs else Status.WAITING)
            assert runs or request.slot == -1
        assert self.num_wanting_logprobs == sum(r.params.num_logprobs is not None for r in live)
        assert self.num_grammars == sum(r.grammar is not None for r in live)
        assert self.num_beams == sum(r.group is not None for r in live)
        assert self.num_pooled == sum(r.pooling is not None for r in live)

    def _count(self, request: Request, by: int) -> None:
        self.num_live += by
        self.num_wanting_logprobs += by * (request.params.num_logprobs is not None)
        self.num_grammars += by * (request.grammar is not None)
        self.num_beams += by * (request.group is not None)
        self.num_pooled += by * (request.pooling is not None)

    @staticmethod
    def _remove(queue: list[Request], request: Request) -> None:
        """Takes a request out of a queue if it is there."""
        i = bisect_left(queue, request.sort_key, key=_sort_key)
        if i < len(queue) and queue[i] is request:
            del queue[i]
