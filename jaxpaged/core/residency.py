"""How requests get and lose slots and blocks."""

from __future__ import annotations

from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.followers import Followers
from jaxpaged.core.host_pool import HostPool
from jaxpaged.core.request import Ending, Request, Status
from jaxpaged.core.roster import Roster
from jaxpaged.core.step import Admission, RequestUpdate, Step


class Residency:
    """Moves requests between waiting, running and ended, with all that they hold.

    Args:
      block_manager: the pool.
      num_host_blocks: room for blocks of preempted requests.
      num_slots: most requests that run at once.

    Attributes:
      roster: who runs and who waits.
      followers: who waits for another sample of its request.
      num_preemptions: how often a request lost its blocks, ever.
      stale: running requests whose tokens the device does not know: the next step tells it.
    """

    def __init__(self, block_manager: BlockManager, num_host_blocks: int, num_slots: int):
        self.block_manager = block_manager
        self.host_pool = HostPool(num_host_blocks)
        self.roster = Roster(num_slots)
        self.followers = Followers()
        self.num_preemptions = 0
        self.stale: list[Request] = []

    def search(self, request: Request) -> bool:
        """Does a part of what makes `find_shared` slow for a long prompt. Returns whether that was the last one."""
        if request.host_key is not None:
            return self.block_manager.search_prefix(request, self._num_not_copied(request))
        return request.source is not None or self.block_manager.search_prefix(request)

    def find_shared(self, request: Request) -> list[int]:
        """Blocks in the pool that a waiting request can start with."""
        pool = self.block_manager
        if request.host_key is not None:
            missing = self._num_not_copied(request)
            shared = pool.find_prefix(request, missing)
            if len(shared) == missing:
                return shared
            self._forget_copy(request)  # it continues what is gone
        if request.source is not None:
            if request.source.holds_them(pool.weight_version):
                return request.source.request.block_ids[: (request.num_tokens - 1) // pool.block_size]
            request.source = None
        return pool.find_prefix(request)

    def start(self, request: Request, shared: list[int], step: Step) -> None:
        """Gives a waiting request a slot, and its first blocks: a source's, or found in the cache, or copied back.

        Args:
          shared: what `find_shared` gave just now.
        """
        pool = self.block_manager
        self.roster.seat(request)
        self.followers.notice(request)
        if request.host_key is not None:
            pool.share_prefix(request, shared)
            pool.cover(request, request.num_computed_tokens)
            self.host_pool.restore(request.host_key, request.block_ids[len(shared) :])
            request.host_key = None
        elif request.source is not None:
            request.num_computed_tokens = request.num_tokens - 1
            if copy := pool.fork(request, request.source.request, request.num_computed_tokens):
                step.copies.append(copy)
            request.source = None
        else:
            pool.share_prefix(request, shared)
            request.num_computed_tokens = len(shared) * pool.block_size
        step.admissions.append(Admission(request.slot, request, list(request.block_ids)))

    def num_blocks_owed(self, request: Request) -> int:
        """Blocks that a running request needs to hold all its known tokens, and does not have yet."""
        return self.block_manager.blocks_for(request.num_tokens) - len(request.block_ids)

    def extend(self, request: Request, num_tokens: int, step: Step) -> int:
        """Schedules up to `num_tokens` more tokens of a request, as far as blocks reach. Returns how many."""
        pool, start = self.block_manager, request.num_computed_tokens
        n = min(num_tokens, (len(request.block_ids) + pool.num_available_blocks) * pool.block_size - start)
        if n <= 0:
            return 0
        step.new_blocks += pool.cover(request, start + n)
        request.num_computed_tokens = start + n
        pool.register(request)
        return n

    def extend_or_preempt(self, request: Request, num_tokens: int, step: Step) -> int:
        """As `extend`, but takes blocks from later requests if there are none. 0: it was the latest itself."""
        while not (n := self.extend(request, num_tokens, step)):
            victim = self.roster.running[-1]
            assert len(self.roster.running) > 1, f"{victim.request_id} is alone and does not fit"
            self.preempt(victim)
            if victim is request:
                return 0
        return n

    def refresh(self, step: Step) -> None:
        """Tells the device the tokens of `stale` requests: each is admitted anew to its slot.

        To be called when the rows of running requests are in the step, so that these have lost their places, or feed
        one token.
        """
        for request in self.stale:
            if request.status is Status.RUNNING:
                before = self.block_manager.blocks_for(request.num_tokens - 1)
                step.admissions.append(Admission(request.slot, request, request.block_ids[:before]))
        self.stale.clear()

    def preempt(self, victim: Request) -> None:
        """Takes slot and blocks from a running request. Its blocks are copied to the host if they fit there.

        The first ones are not, while others hold them too: they are found again in the prefix cache. If the cache has
        lost them meanwhile, the copy of what comes after them is of no use, and all is computed again. The request
        waits again; but a beam whose next token is not decided is parked.
        """
        of_these_weights = victim.weight_version == self.block_manager.weight_version
        own = victim.block_ids[self.block_manager.num_shared_blocks(victim) :]
        victim.host_key = self.host_pool.save(own) if own and of_these_weights else None
        self._vacate(victim)
        if victim.host_key is None:
            victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        if victim.group is None or not victim.num_inflight_tokens:
            self.roster.queue(victim)

    def end(self, request: Request, ending: Ending) -> RequestUpdate:
        """Ends a live sample, wherever it is. Returns its last update."""
        if request.status is Status.RUNNING:
            self._vacate(request)
        self._forget_copy(request)
        self.roster.leave(request)
        self.followers.notice(request)
        request.finish_reason, request.stop_reason = ending
        cached = max(0, request.num_cached_tokens)
        times = request.queued_time, request.scheduled_time
        return RequestUpdate(request.request_id, [], None, *ending, cached, request.index, *times)

    def forget(self) -> None:
        """The weights have changed: what waiting requests had computed, and every cached prefix, is void."""
        self.block_manager.reset_prefix_cache()
        for samples in self.roster.samples.values():
            for request in samples:
                self._forget_copy(request)

    def check_invariants(self) -> None:
        """Raises AssertionError unless queues, slots, blocks and host copies agree."""
        pool = self.block_manager
        self.roster.check_invariants()
        copies: dict[int, int] = {}
        for request in (request for samples in self.roster.samples.values() for request in samples):
            num_tokens = request.num_tokens + request.num_inflight_tokens
            assert 0 <= num_tokens <= request.max_total_tokens
            if request.status is Status.RUNNING:
                assert request.num_computed_tokens < num_tokens and request.host_key is None
                assert len(request.block_ids) == pool.blocks_for(request.num_computed_tokens)
                continue
            assert not request.block_ids and (request.host_key is None) == (not request.num_computed_tokens)
            if request.host_key is not None:
                copies[request.host_key] = self.host_pool.size(request.host_key)
                assert self._num_not_copied(request) >= 0, "a copy of more than it had"
        self.host_pool.check_invariants(copies)
        pool.check_invariants(request.block_ids for request in self.roster.running)

    def _num_not_copied(self, request: Request) -> int:
        """How many blocks come before those that a preempted request has in host memory."""
        assert request.host_key is not None
        return self.block_manager.blocks_for(request.num_computed_tokens) - self.host_pool.size(request.host_key)

    def _vacate(self, request: Request) -> None:
        self.block_manager.release(request)
        self.roster.unseat(request)

    def _forget_copy(self, request: Request) -> None:
        if request.host_key is not None:
            self.host_pool.drop(request.host_key)
            request.host_key = None
            request.num_computed_tokens = 0
