"""The samples of a request after the first, while they wait for the first one to compute their prompt."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpaged.core.request import Request, Source, Status


class Followers:
    """Parked samples by the first one of their request."""

    def __init__(self) -> None:
        self._followers: dict[Request, Sequence[Request]] = {}

    @property
    def parked(self) -> list[Request]:
        """Live samples that wait here."""
        waiting = [request for followers in self._followers.values() for request in followers]
        return [request for request in waiting if request.status is not Status.FINISHED]

    def add(self, first: Request, followers: Sequence[Request]) -> None:
        """Parks `followers` until `first` has computed the prompt."""
        if followers:
            self._followers[first] = followers

    def release(self) -> list[Request]:
        """The samples whose first one has computed the prompt in an earlier step, or has ended."""
        released: list[Request] = []
        for first in list(self._followers):
            computed = first.status is Status.RUNNING and first.num_computed_tokens >= first.num_prompt_tokens
            if computed or first.status is Status.FINISHED:
                for request in self._followers.pop(first):
                    if request.status is not Status.FINISHED:
                        request.num_cached_tokens = max(0, first.num_cached_tokens)  # the prompt counts once
                        request.source = Source(first, first.num_preemptions)
                        released.append(request)
        return released
