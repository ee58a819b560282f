"""Which requests get how many tokens in the next step.

There is no prefill and no decode phase: a step gives each running request tokens until `num_computed_tokens`
catches up with what is known or in flight. `schedule` of step n+1 may come before `update` of step n: counts
advance when a step is scheduled, and a token that is sampled but not yet seen on the host is *in flight*.

The rules:

- First come, first served. `running` is in order of arrival, and every waiting request came later (or was
  preempted, and then waits in front). A policy is two choices: the head of `waiting`, and the victim in `_preempt`.
- Each running request has one token of the step reserved, so prompts never starve decodes.
- A prompt too long to end in one whole step takes at most half of the tokens that are left; what nobody else
  takes goes back to the prompts, oldest first. So a short prompt starts, and ends, while a giant is on its way.
- A request is admitted when the pool has room for all its known tokens and a new one, besides those of admitted
  prompts and one more block for each running request: half-admitted prompts do not wait for each other, and
  nobody is admitted only to be preempted a step later.
- Out of blocks, the latest running request is preempted: it loses its blocks and is computed again later. Only
  a later request gives way to an earlier one, so the first always progresses.
- A request that would outgrow the whole pool ends there, with "length".
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.request import Request, Status
from jaxpaged.core.step import Admission, RequestUpdate, Step, StepResult
from jaxpaged.errors import InvalidRequestError, RequestTooLargeError


@dataclass(slots=True)
class _Chunk:
    """A row whose number of tokens is still open: part or rest of a prompt."""

    request: Request
    start: int
    num_tokens: int


class Scheduler:
    """Turns requests into steps, and steps' results into updates.

    Args:
      block_manager: the pool; this scheduler alone uses it.
      max_num_seqs: rows of the largest step, and device slots.
      max_num_batched_tokens: tokens of the largest step, at least `max_num_seqs`.
      max_model_len: longest sequence, prompt and output together.

    Attributes:
      running: requests with a slot, in order of arrival.
      waiting: requests without, the next one first, by id.
      num_preemptions: how often a request lost its blocks, ever.
      prefix_cache_queries, prefix_cache_hits: prompt tokens looked up and found, ever; each request counts once.
    """

    def __init__(
        self, block_manager: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ):
        assert 1 <= max_num_seqs <= max_num_batched_tokens, (max_num_seqs, max_num_batched_tokens)
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.running: list[Request] = []
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._requests: dict[str, Request] = {}  # all live ones, in order of arrival
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._num_wanting_logprobs = 0  # live requests that do

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished. `schedule` may still return None while its last token is in flight."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self.running)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          InvalidRequestError: no prompt, or the id is that of a live request.
          RequestTooLargeError: with at least one new token it can never fit the context or the pool.
        """
        length, pool = request.num_prompt_tokens, self.block_manager
        if length < 1:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        if length > self.max_model_len - 1:
            raise RequestTooLargeError(
                f"the prompt has {length} tokens; the context of {self.max_model_len} leaves room for "
                f"{self.max_model_len - 1} and one new token",
                param="prompt",
            )
        if pool.blocks_for(length + 1) > pool.num_blocks:
            raise RequestTooLargeError(
                f"the prompt of {length} tokens and one new token need {pool.blocks_for(length + 1)} blocks of "
                f"{pool.block_size} tokens; the KV cache has {pool.num_blocks}",
                param="prompt",
            )
        # The last token is never fed, so the longest sequence is one longer than the pool.
        longest = min(self.max_model_len, pool.num_blocks * pool.block_size + 1)
        request.max_total_tokens = min(request.max_total_tokens, longest)
        self._requests[request.request_id] = self.waiting[request.request_id] = request
        self._num_wanting_logprobs += request.params.logprobs is not None

    def abort(self, request_id: str) -> RequestUpdate | None:
        """Ends a request at once and takes its blocks back; results still in flight will be dropped.

        Returns:
          Its last update, or None if no live request has this id.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._finish(request, "abort")
        num_cached = max(0, request.num_cached_tokens)
        return RequestUpdate(request_id, [], finish_reason="abort", num_cached_tokens=num_cached)

    def abort_all(self) -> None:
        """Ends every live request."""
        for request in list(self._requests.values()):
            self._finish(request, "abort")

    def schedule(self) -> Step | None:
        """The next step, or None when no request can use one before a result in flight arrives.

        The caller launches it before it calls anything else here: from now on its writes count as done.
        """
        step = Step()
        chunks: list[_Chunk] = []
        self._schedule_running(step, chunks)
        left = self.max_num_batched_tokens - len(step.requests) - sum(chunk.num_tokens for chunk in chunks)
        left = self._admit(step, chunks, left)
        for chunk in chunks:
            if left <= 0:
                break
            more = self._extend(chunk.request, min(left, chunk.request.num_remaining_tokens), step)
            chunk.num_tokens += more
            left -= more
        self._complete(step, chunks)
        return step if step.requests else None

    def update(self, step: Step, result: StepResult) -> list[RequestUpdate]:
        """Appends a step's new tokens to its requests and ends those that are done.

        A row may bring several tokens, if no later step holds its request; those after the first that ends the
        request are cut off. Rows of requests that ended meanwhile are dropped; a preempted one keeps its token.

        Args:
          step: the oldest step not updated yet.
          result: the device's answer to it.

        Returns:
          An update for each live request that got a token, in row order.
        """
        updates: list[RequestUpdate] = []
        finished = Status.FINISHED
        all_logprobs = result.logprobs or [None] * len(step.requests)
        for request, samples, tokens, logprobs in zip(
            step.requests, step.samples, result.token_ids, all_logprobs, strict=True
        ):
            if not samples or request.status is finished:
                continue
            request.num_inflight_tokens -= 1
            assert len(tokens) <= 1 or not request.num_inflight_tokens, "a later step was laid out for one token"
            ids, end = request.all_token_ids, request.max_total_tokens
            eos, stops = request.eos_token_ids, request.stop_token_ids
            for i, token in enumerate(tokens, 1):
                if token < 0:
                    self._finish(request, "error", "the model's logits are NaN or infinite")
                    self.reset_prefix_cache()  # its blocks may hold NaN too
                    tokens, logprobs = tokens[: i - 1], logprobs and logprobs[: i - 1]
                    break
                ids.append(token)
                if (token in eos or token in stops or len(ids) >= end) and (ending := request.ending()):
                    self._finish(request, *ending)
                    if i < len(tokens):
                        tokens, logprobs = tokens[:i], logprobs and logprobs[:i]
                    break
            reason, stop_reason = request.finish_reason, request.stop_reason
            updates.append(
                RequestUpdate(request.request_id, tokens, logprobs, reason, stop_reason, request.num_cached_tokens)
            )
        return updates

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix: call it when the weights change."""
        self.block_manager.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Raises AssertionError unless queues, slots and the block manager's books agree."""
        running, waiting = self.running, list(self.waiting.values())
        assert running + waiting == list(self._requests.values()), "in two queues, or out of order of arrival"
        slots = [r.slot for r in running] + self._free_slots
        assert sorted(slots) == list(range(self.max_num_seqs)), "a slot is lost or taken twice"
        for request in running:
            assert request.status is Status.RUNNING
            assert request.num_computed_tokens < request.num_tokens + request.num_inflight_tokens
            assert len(request.block_ids) == self.block_manager.blocks_for(request.num_computed_tokens)
        for request in waiting:
            assert request.status is Status.WAITING and request.slot == -1
            assert not request.block_ids and not request.num_computed_tokens
        for request in running + waiting:
            assert 0 <= request.num_tokens + request.num_inflight_tokens <= request.max_total_tokens
        assert self._num_wanting_logprobs == sum(r.params.logprobs is not None for r in running + waiting)
        self.block_manager.check_invariants(r.block_ids for r in running)

    def _schedule_running(self, step: Step, chunks: list[_Chunk]) -> None:
        """Rows for the requests that have a slot. This is the hot path: most rows feed one token to a known block."""
        block_size = self.block_manager.block_size
        left = self.max_num_batched_tokens - len(self.running)  # besides the one reserved for each
        add_request, add_slot, add_start = step.requests.append, step.slots.append, step.starts.append
        # Preemption pops from the end: requests not visited yet, or the visited one itself, which ends the loop.
        for request in self.running:
            total = len(request.all_token_ids) + request.num_inflight_tokens
            start = request.num_computed_tokens
            remaining = total - start
            if remaining > 1:
                n = self._extend_or_preempt(request, self._share(remaining, left + 1), step)
                if n:
                    chunks.append(_Chunk(request, start, n))
                    left -= n - 1
                continue
            if total >= request.max_total_tokens:
                continue  # its last token is in flight
            if start % block_size:
                request.num_computed_tokens = start + 1
            elif not self._extend_or_preempt(request, 1, step):
                continue
            request.num_inflight_tokens += 1
            add_request(request)
            add_slot(request.slot)
            add_start(start)
        step.num_tokens = [1] * len(step.requests)
        step.samples = [True] * len(step.requests)

    def _admit(self, step: Step, chunks: list[_Chunk], left: int) -> int:
        """Gives slots to waiting requests while slots, blocks and tokens last. Returns the tokens left."""
        pool = self.block_manager
        owed = sum(self._num_blocks_owed(chunk.request) for chunk in chunks)
        while left > 0 and self.waiting and self._free_slots:
            request = next(iter(self.waiting.values()))
            if request.num_inflight_tokens:
                break  # preempted: the device has to be told its tokens, so they must be known
            prefix = pool.find_prefix(request)
            needed = pool.blocks_for(request.num_tokens + 1) - len(prefix)
            if self.running and needed + owed + len(self.running) > pool.num_available_after(prefix):
                break
            self._start(request, prefix, step)
            start = request.num_computed_tokens
            n = self._extend(request, self._share(request.num_tokens - start, left), step)
            assert n, f"no block for {request.request_id}, which should fit"
            chunks.append(_Chunk(request, start, n))
            owed += self._num_blocks_owed(request)
            left -= n
        return left

    def _start(self, request: Request, prefix: list[int], step: Step) -> None:
        del self.waiting[request.request_id]
        self.block_manager.share_prefix(request, prefix)
        request.num_computed_tokens = len(prefix) * self.block_manager.block_size
        request.status = Status.RUNNING
        request.slot = self._free_slots.pop()
        self.running.append(request)
        step.admissions.append(Admission(request.slot, request, prefix))
        if request.num_cached_tokens < 0:  # what a preempted request finds again is no hit
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_cache_queries += request.num_prompt_tokens
            self.prefix_cache_hits += request.num_cached_tokens

    def _complete(self, step: Step, chunks: list[_Chunk]) -> None:
        """Adds the chunks' rows, those that came down to one token first."""
        chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
        for chunk in chunks:
            request = chunk.request
            samples = not request.num_remaining_tokens
            request.num_inflight_tokens += samples
            step.requests.append(request)
            step.slots.append(request.slot)
            step.starts.append(chunk.start)
            step.num_tokens.append(chunk.num_tokens)
            step.samples.append(samples)
        step.total_tokens = sum(step.num_tokens)
        if self._num_wanting_logprobs:
            rows = zip(step.requests, step.samples, strict=True)
            step.wants_logprobs = any(samples and r.params.logprobs is not None for r, samples in rows)

    def _share(self, remaining: int, left: int) -> int:
        """How many of a prompt's `remaining` tokens go into a step that has room for `left`, at first."""
        if remaining > self.max_num_batched_tokens:
            left = max(left // 2, min(left, self.block_manager.block_size))
        return min(remaining, left)

    def _num_blocks_owed(self, request: Request) -> int:
        """Blocks that a request needs to hold all its known tokens, and does not have yet."""
        return self.block_manager.blocks_for(request.num_tokens) - len(request.block_ids)

    def _extend(self, request: Request, num_tokens: int, step: Step) -> int:
        """Schedules up to `num_tokens` more tokens of a request, as far as blocks reach. Returns how many."""
        pool, table, start = self.block_manager, request.block_ids, request.num_computed_tokens
        n = min(num_tokens, (len(table) + pool.num_available_blocks) * pool.block_size - start)
        if n <= 0:
            return 0
        for index in range(len(table), pool.blocks_for(start + n)):
            step.new_blocks.append((request.slot, index, pool.append_block(request)))
        request.num_computed_tokens = start + n
        pool.register(request)
        return n

    def _extend_or_preempt(self, request: Request, num_tokens: int, step: Step) -> int:
        """As `_extend`, but takes blocks from later requests if there are none. 0: it was the latest itself."""
        while not (n := self._extend(request, num_tokens, step)):
            if self._preempt() is request:
                return 0
        return n

    def _preempt(self) -> Request:
        """Takes slot and blocks from the latest running request and puts it first in the queue."""
        victim = self.running[-1]
        assert len(self.running) > 1, f"{victim.request_id} is alone and does not fit"
        self._vacate(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.status = Status.WAITING
        self.waiting[victim.request_id] = victim
        self.waiting.move_to_end(victim.request_id, last=False)
        self.num_preemptions += 1
        return victim

    def _vacate(self, request: Request) -> None:
        self.running.remove(request)
        self.block_manager.release(request)
        self._free_slots.append(request.slot)
        request.slot = -1

    def _finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        if request.status is Status.RUNNING:
            self._vacate(request)
        else:
            del self.waiting[request.request_id]
        del self._requests[request.request_id]
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        self._num_wanting_logprobs -= request.params.logprobs is not None
