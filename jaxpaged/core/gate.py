"""Who of those that wait gets a slot in the next step."""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxpaged.core.budget import Budget
from jaxpaged.core.draft import Chunk, Draft
from jaxpaged.core.latecomers import Latecomers
from jaxpaged.core.request import Request
from jaxpaged.core.residency import Residency


class Gate:
    """Admits waiting requests in their order, while slots, blocks and tokens last.

    Args:
      residency: who holds what.
      budget: how prompts share a step.
      clock: gives seconds as in the requests' arrival times.

    Attributes:
      latecomers: who waits for a prefix that is being computed; a slot is kept for each, which only those
        before it may take.
      prefix_cache_queries, prefix_cache_hits: prompt tokens looked up and found, ever; each request counts once.
    """

    def __init__(self, residency: Residency, budget: Budget, clock: Callable[[], float] = time.monotonic):
        self._residency, self._budget, self._clock = residency, budget, clock
        self.latecomers = Latecomers(residency.block_manager.block_size)
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
            has_slot = roster.num_free_slots > self.latecomers.num_before(request)
            if draft.has_rows and has_slot and not residency.search(request):
                draft.is_searching = True  # its prompt is long, and these rows need not wait for a look at all of it
                break
            shared = residency.find_shared(request) if has_slot else []
            if has_slot and self._comes_late(request, shared, draft):
                roster.park(request)
                continue
            needed = pool.blocks_for(request.num_tokens + 1) - len(shared)
            fits = not running or needed + owed + len(running) <= pool.num_available_after(shared)
            if not (fits and has_slot):
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

    def _comes_late(self, request: Request, shared: list[int], draft: Draft) -> bool:
        """Whether it is better to wait for more of the prefix than the blocks that were found."""
        pool = self._residency.block_manager
        if not pool.enable_prefix_caching or request.host_key is not None or request.source or request.group:
            return False
        running = (chunk.request for chunk in draft.chunks)
        return self.latecomers.hold(request, len(shared) * pool.block_size, running)

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
