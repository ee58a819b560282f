"""Who of those that wait gets a slot in the next step."""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxpaged.core.budget import Budget
from jaxpaged.core.draft import Chunk, Draft
from jaxpaged.core.request import Request
from jaxpaged.core.residency import Residency


class Gate:
    """Admits waiting requests in their order, while slots, blocks and tokens last.

    Args:
      residency: who holds what.
      budget: how prompts share a step.
      clock: gives seconds as in the requests' arrival times.

    Attributes:
      prefix_cache_queries, prefix_cache_hits: prompt tokens looked up and found, ever; each request counts once.
    """

    def __init__(self, residency: Residency, budget: Budget, clock: Callable[[], float] = time.monotonic):
        self._residency, self._budget, self._clock = residency, budget, clock
        self.prefix_cache_queries = self.prefix_cache_hits = 0

    def admit(self, draft: Draft) -> None:
        """Adds chunks of requests that come in. The rows of those that run are in the draft."""
        residency, roster, pool = self._residency, self._residency.roster, self._residency.block_manager
        running, waiting = roster.running, roster.waiting
        left = draft.budget - draft.num_tokens
        owed = sum(residency.num_blocks_owed(chunk.request) for chunk in draft.chunks)
        while left > 0 and waiting:
            request = waiting[0]
            if request.num_inflight_tokens:
                break  # preempted: the device has to be told its tokens, so they must be known
            if draft.has_rows and roster.has_slot and not residency.search(request):
                draft.is_searching = True  # its prompt is long, and these rows need not wait for a look at all of it
                break
            shared = residency.find_shared(request) if roster.has_slot else []
            needed = pool.blocks_for(request.num_tokens + 1) - len(shared)
            fits = not running or needed + owed + len(running) <= pool.num_available_after(shared)
            if not (fits and roster.has_slot):
                if self._displace_idle_beam(draft):
                    continue
                break
            residency.start(request, shared, draft.step)
            self._note(request)
            start = request.num_computed_tokens
            n = residency.extend(request, self._budget.share(request.num_tokens - start, left), draft.step)
            assert n, f"no block for {request.request_id}, which should fit"
            draft.chunks.append(Chunk(request, start, n))
            owed += residency.num_blocks_owed(request)
            left -= n

    def _displace_idle_beam(self, draft: Draft) -> bool:
        """Takes the place of a beam that can do nothing until another one has run. Returns whether there was one."""
        roster = self._residency.roster
        if roster.num_beams and not draft.step.copies:  # its blocks may be copied from in this step
            for request in reversed(roster.running):
                if request.group is not None and request.group.can_yield(request):
                    self._residency.preempt(request)
                    return True
        return False

    def _note(self, request: Request) -> None:
        if request.scheduled_time is None:
            request.scheduled_time = self._clock()
        if request.num_cached_tokens < 0:  # what a preempted request finds again is no hit
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_cache_queries += request.num_prompt_tokens
            self.prefix_cache_hits += request.num_cached_tokens
