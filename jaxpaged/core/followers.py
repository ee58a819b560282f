"""The samples of a request after the first, while they wait for the first one to compute their prompt."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpaged.core.request import Request, Source, Status


class Followers:
    """Parked samples by the first one of their request.

    Only those whose first one has been *noticed* are looked at: thousands may wait.
    """

    def __init__(self) -> None:
        self._followers: dict[Request, Sequence[Request]] = {}
        self._noticed: dict[Request, None] = {}  # in order; first ones that run, or have ended

    @property
    def parked(self) -> list[Request]:
        """Live samples that wait here."""
        waiting = [request for followers in self._followers.values() for request in followers]
        return [request for request in waiting if request.status is not Status.FINISHED]

    def add(self, first: Request, followers: Sequence[Request]) -> None:
        """Parks `followers` until `first` has computed the prompt."""
        if followers:
            self._followers[first] = followers

    def notice(self, request: Request) -> None:
        """To be told when any request has got a slot, or has ended."""
        if request in self._followers:
            self._noticed[request] = None

    def release(self) -> list[Request]:
        """The samples whose first one has computed the prompt in an earlier step, or has ended."""
        released: list[Request] = []
        for first in list(self._noticed):
            if first.status is Status.RUNNING and first.num_computed_tokens < first.num_prompt_tokens:
                continue
            del self._noticed[first]
            if first.status is Status.WAITING:  # preempted: it will be noticed again
                continue
            for request in self._followers.pop(first):
                if request.status is not Status.FINISHED:
                    request.num_cached_tokens = max(0, first.num_cached_tokens)  # the prompt counts once
                    request.source = Source(first, first.num_preemptions)
                    released.append(request)
        return released
