"""Which requests get how many tokens in the next step.

There is no prefill and no decode phase: a step gives each running request tokens until `num_computed_tokens`
catches up with what is known or in flight. `schedule` of step n+1 may come before `update` of step n: counts
advance when a step is scheduled, and a token that is sampled but not yet seen on the host is *in flight*.

The rules:

- Each request has a sort key for life, by default its arrival. `running` and `waiting` are in its order: the smallest
  key is served first, the largest is preempted first. A preempted request keeps its key, so it comes back first.
- Each running request has one token of the step reserved, so prompts never starve decodes.
- A prompt too long to end in one whole step takes at most half of the tokens that are left; what nobody else
  takes goes back to the prompts, in order. So a short prompt starts, and ends, while a giant is on its way.
- Where all that could be computed would need much padding, the end of a prompt waits for the next step: see
  `StepSizes`. A token to be generated never does.
- A request is admitted when the pool has room for all its known tokens and a new one, besides those of admitted
  prompts and one more block for each running request: half-admitted prompts do not wait for each other, and
  nobody is admitted only to be preempted a step later.
- Out of blocks, the last running request is preempted. Its blocks are copied to the host if they fit there, else
  they are computed again later. Only a later request gives way to an earlier one, so the first always progresses.
- A request that shares more of its prompt with one that is being computed than is computed yet waits until it is:
  see `Latecomers`. Others go past it.
- The samples of a request after the first wait until its prompt has been computed, and then share its blocks.
- A request that would outgrow the whole pool ends there, with "length".
- A request for a vector ends with its prompt: the vector is in flight in place of a token.
- A step in which everybody decodes may be several, if the next ones are certain to be alike.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from jaxpaged.core.beam_group import BeamGroup
from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.budget import Budget
from jaxpaged.core.deadlines import Deadlines
from jaxpaged.core.draft import Chunk, Draft
from jaxpaged.core.gate import Gate
from jaxpaged.core.intake import Intake
from jaxpaged.core.request import Ending, Request, Status
from jaxpaged.core.residency import Residency
from jaxpaged.core.size_limits import check_size, longest_sequence
from jaxpaged.core.step import RequestUpdate, Step, StepResult
from jaxpaged.core.step_sizes import StepSizes
from jaxpaged.core.stretch import stretch
from jaxpaged.errors import InvalidRequestError, QueueFullError

_ABORTED = Ending("abort")


class Scheduler:
    """Turns requests into steps, and steps' results into updates.

    Args:
      block_manager: the pool; this scheduler alone uses it.
      max_num_seqs: rows of the largest step, and device slots.
      max_num_batched_tokens: tokens of the largest step, at least `max_num_seqs`.
      max_model_len: longest sequence, prompt and output together.
      key: a request's place in both queues, smaller first; what it gives must compare. Default: order of arrival.
      num_host_blocks: room in host memory for the blocks of preempted requests.
      max_num_queued_requests: samples that may wait; None: no limit.
      step_sizes: what steps with prompts are padded to.
      clock: gives seconds as in the requests' arrival times, for timeouts and time in the queue.

    Attributes:
      roster: who is live, runs and waits.
      running: requests with a slot, in order.
      waiting: requests that wait for one, in order.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        key: Callable[[Request], Any] | None = None,
        num_host_blocks: int = 0,
        max_num_queued_requests: int | None = None,
        step_sizes: StepSizes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        assert max_num_batched_tokens >= max_num_seqs >= 1, (max_num_batched_tokens, max_num_seqs)
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_num_queued_requests = max_num_queued_requests
        self._key, self._clock = key, clock
        self._budget = Budget(max_num_batched_tokens, max_num_seqs, block_manager.block_size, step_sizes or StepSizes())
        self._residency = Residency(block_manager, num_host_blocks, max_num_seqs)
        self.roster = self._residency.roster
        self.running, self.waiting = self.roster.running, self.roster.waiting
        self._requests = self.roster.samples
        self._deadlines = Deadlines(clock)
        self._followers = self._residency.followers
        self._gate = Gate(self._residency, self._budget, clock)
        self._intake = Intake(self._residency)
        self._serials = itertools.count()
        self._unreported: list[RequestUpdate] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or has an update that nobody has fetched, or a host copy is left over.

        `schedule` may still return None while the last token is in flight.
        """
        return bool(self._requests or self._unreported or self._residency.host_pool.has_dropped)

    @property
    def num_preemptions(self) -> int:
        """How often a request lost its blocks, ever."""
        return self._residency.num_preemptions

    @property
    def prefix_cache_queries(self) -> int:
        """Prompt tokens that were looked up in the prefix cache, ever; each request counts once."""
        return self._gate.prefix_cache_queries

    @property
    def prefix_cache_hits(self) -> int:
        """How many of them were found."""
        return self._gate.prefix_cache_hits

    @property
    def num_swapped(self) -> int:
        """Waiting samples whose blocks are in host memory."""
        return self._residency.host_pool.num_copies

    @property
    def num_waiting(self) -> int:
        """Samples without a slot."""
        return self.roster.num_live - len(self.running)

    @property
    def num_running(self) -> int:
        """Samples with a slot."""
        return len(self.running)

    def first_waiting(self, most: int) -> list[Request]:
        """The first of those that wait for a slot or for a prefix, in order."""
        return sorted([*self.waiting[:most], *self._gate.latecomers.parked], key=attrgetter("sort_key"))[:most]

    def add(self, request: Request) -> None:
        """Queues all samples of a request.

        Raises:
          InvalidRequestError: no prompt, or the id is that of a live request.
          RequestTooLargeError: with at least one new token it can never fit the context or the pool.
          QueueFullError: too many wait already. To an empty queue any request is admitted.
        """
        check_size(request, self.block_manager, self.max_model_len)
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        num_samples, limit = request.params.num_samples, self.max_num_queued_requests
        if limit is not None and self.num_waiting and self.num_waiting + num_samples > limit:
            raise QueueFullError(f"{self.num_waiting} requests wait already, and at most {limit} may: try again later")
        if request.pooling is None:
            longest = longest_sequence(self.block_manager, self.max_model_len)
            request.max_total_tokens = min(request.max_total_tokens, longest)
        request.sort_key = (self._key(request) if self._key else 0, next(self._serials), 0)
        request.queued_time = self._clock()
        if request.params.use_beam_search:
            self._deadlines.add(request)
            BeamGroup(request, self._residency)
            return
        samples = [request, *(request.fork(i) for i in range(1, num_samples))]
        for sample in samples:
            self.roster.enter(sample)
            self._deadlines.add(sample)
        self.roster.queue(request)
        self._followers.add(request, samples[1:])

    def abort(self, request_id: str, index: int | None = None) -> list[RequestUpdate]:
        """Ends a request, or only its sample `index`, and takes the blocks back; results in flight will be dropped.

        A beam search ends as a whole.

        Returns:
          The last update of each sample that this ended; none if there was none (any more).
        """
        samples = list(self._requests.get(request_id, ()))
        if samples and samples[0].group is not None:
            return self._end(samples[0], _ABORTED)
        return [self._residency.end(sample, _ABORTED) for sample in samples if index in (None, sample.index)]

    def fail(self, request: Request, message: str) -> RequestUpdate:
        """Ends one sample with an error; its row of a step in flight is ignored. It must be live."""
        return self._residency.end(request, Ending("error", message))

    def abort_all(self) -> None:
        """Ends every live request. Updates that nobody has fetched are dropped."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._unreported.clear()

    def schedule(self, max_steps: int = 1) -> Step | None:
        """The next step, or None when no request can use one before a result in flight arrives.

        The caller launches it before it calls anything else here: from now on its writes count as done.
        Requests whose time is over end here; `update` or `drain` gives their updates.

        Args:
          max_steps: it may be so many steps as one. Such a step has to be updated before the next one is scheduled:
            how far it went is known only then.
        """
        if self._deadlines:
            for late in self._deadlines.expired():
                self._unreported += self._end(late, Ending("abort", "timeout"))
        for request in (*self._followers.release(), *self._gate.latecomers.release(self.block_manager.weight_version)):
            self.roster.queue(request)
        draft = Draft(self._budget.num_tokens(self.running, self.waiting))
        self._schedule_running(draft)
        if self._residency.stale:
            self._residency.refresh(draft.step)
        self._gate.admit(draft)
        self._fill(draft)
        self._budget.note(draft.chunks)
        if not draft.has_rows:
            return None
        self._residency.host_pool.flush(draft.step)
        roster = self.roster
        step = draft.complete(
            logprobs=bool(roster.num_wanting_logprobs),
            masks=bool(roster.num_grammars),
            vectors=bool(roster.num_pooled),
        )
        if max_steps > 1 and not (draft.chunks or draft.is_searching) and self._is_steady(step):
            stretch(step, self.block_manager, max_steps)
        return step

    def update(self, step: Step, result: StepResult) -> list[RequestUpdate]:
        """Appends a step's new tokens to its requests and ends those that are done.

        Args:
          step: the oldest step not updated yet.
          result: the device's answer to it.

        Returns:
          What `drain` gives; then an update for each piece of prompt log-probabilities; one for each vector; one
          for each live request that got a token, in row order.
        """
        return [*self.drain(), *self._intake.update(step, result)]

    def drain(self) -> list[RequestUpdate]:
        """Last updates of requests that ended outside of `update`, such as by timeout.

        `update` gives them too. So an engine that has no step to update must ask here, and pass on what it gets.
        """
        updates, self._unreported = self._unreported, []
        return updates

    def take_dropped(self) -> list[int]:
        """Keys of host copies that nobody will ask for, each told once.

        A step tells them too. So an engine asks here when `schedule` has given none, and frees them.
        """
        return self._residency.host_pool.take_dropped()

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix, and the host copies: call it when the weights change."""
        self._residency.forget()

    def check_invariants(self) -> None:
        """Raises AssertionError unless queues, slots and the block manager's books agree."""
        queued = self.running + self.waiting + self._followers.parked + self._gate.latecomers.parked
        live = [request for samples in self._requests.values() for request in samples]
        queued += [r for r in live if r.group and r.num_inflight_tokens and r.status is Status.WAITING]
        assert sorted(map(id, queued)) == sorted(map(id, live)), "a request is lost"
        self._residency.check_invariants()

    def _schedule_running(self, draft: Draft) -> None:
        """Rows for the requests that have a slot. This is the hot path: most rows feed one token to a known block."""
        step, block_size = draft.step, self.block_manager.block_size
        extend = self._residency.extend_or_preempt
        left = draft.budget - len(self.running)  # besides the one reserved for each
        rows, slots, starts = step.requests, step.slots, step.starts
        # Preemption pops from the end: requests not visited yet, or the visited one itself, which ends the loop.
        for request in self.running:
            total = len(request.all_token_ids) + request.num_inflight_tokens
            start = request.num_computed_tokens
            remaining = total - start
            if remaining > 1:
                n = extend(request, self._budget.share(remaining, left + 1), step)
                if n:
                    draft.chunks.append(Chunk(request, start, n))
                    left -= n - 1
                continue
            if total >= request.max_total_tokens:
                continue  # its last token is in flight
            if start % block_size:
                request.num_computed_tokens = start + 1
            elif not extend(request, 1, step):
                continue
            request.num_inflight_tokens += 1
            rows.append(request)
            slots.append(request.slot)
            starts.append(start)
        step.num_tokens = [1] * len(rows)
        step.samples = [True] * len(rows)

    def _fill(self, draft: Draft) -> None:
        """Gives the tokens that nobody took to the prompts."""
        left = draft.budget - draft.num_tokens
        for chunk in draft.chunks:
            if left <= 0:
                break
            more = self._residency.extend(chunk.request, min(left, chunk.request.num_remaining_tokens), draft.step)
            chunk.num_tokens += more
            left -= more

    def _is_steady(self, step: Step) -> bool:
        """Whether the steps after one of decodes are sure to be like it, until a row ends or somebody comes."""
        moves = step.admissions or step.copies or step.swap_out or step.swap_in
        needs_host = step.masked or step.wants_logprobs or step.pooled
        comes_back = self.waiting and self.waiting[0].num_inflight_tokens
        if moves or needs_host or comes_back or len(step.requests) != len(self.running):
            return False
        return all(at >= request.num_prompt_tokens for request, at in zip(step.requests, step.starts, strict=True))

    def _end(self, request: Request, ending: Ending) -> list[RequestUpdate]:
        """Ends a live sample, or the whole beam search that it is part of."""
        return [self._residency.end(request, ending)] if request.group is None else request.group.end(ending)
