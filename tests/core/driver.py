"""The engine's loop over a simulated device, which checks all it can after every move."""

from collections import deque
from collections.abc import Sequence

from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.request import Grammar, Request, Status
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.step import RequestUpdate, Step, StepResult, TokenLogprobs
from tests.core.simulated_device import Sampler, SimulatedDevice, greedy_of
from tests.core.solo import prompt_logprobs, solo, solo_beams, solo_vector


def key_of(request_id: str, index: int) -> str:
    """How a test calls a sample: the first one as its request."""
    return f"{request_id}#{index}" if index else request_id


class Driver:
    """Runs requests, and keeps what came back of each sample.

    Args:
      overlap: 1 updates a step after the next one was scheduled, 0 at once.
      burst: rows bring several tokens where that is allowed.
      max_steps: how many steps may be one.
      scheduler_options: as `Scheduler`'s.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 64,
        overlap: int = 1,
        enable_prefix_caching: bool = True,
        vocab_size: int = 1000,
        sample: Sampler | None = None,
        burst: bool = False,
        max_steps: int = 1,
        scheduler_options: dict | None = None,
        **manager_options,
    ):
        self.now = 0.0
        self.manager = BlockManager(num_blocks, block_size, enable_prefix_caching, **manager_options)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            clock=lambda: self.now,
            **(scheduler_options or {}),
        )
        self.sample = sample or greedy_of(vocab_size)
        self.device = SimulatedDevice(
            num_blocks,
            block_size,
            max_num_seqs,
            self.sample,
            vocab_size=vocab_size,
            num_host_blocks=self.scheduler._residency.host_pool.num_blocks,
            burst=burst and not overlap,
        )
        self.overlap, self.max_model_len, self.max_steps = overlap, max_model_len, max_steps
        self.pending: deque[tuple[Step, StepResult]] = deque()
        self.requests: dict[str, Request] = {}  # every sample, by `key_of`
        self.grammars: dict[str, Grammar] = {}  # in their first state
        self.streamed: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.finished: dict[str, RequestUpdate] = {}
        self.last_step: Step | None = None

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        eos=(),
        cache_salt=None,
        priority=0,
        grammar=None,
        pooling: str | None = None,
        **params,
    ) -> Request:
        request = Request(
            request_id,
            prompt,
            SamplingParams(**params),
            max_model_len=self.max_model_len,
            eos_token_ids=eos,
            cache_salt=cache_salt,
            priority=priority,
            grammar=grammar and grammar.copy(),
            pooling=pooling and PoolingParams(pooling=pooling),
            arrival_time=self.now,
        )
        self.scheduler.add(request)
        beams = params.get("use_beam_search", False)
        samples = [request] * request.params.n if beams else self.scheduler._requests[request_id]
        for index, sample in enumerate(samples):
            key = key_of(request_id, index)
            self.requests[key] = sample
            if grammar is not None:
                self.grammars[key] = grammar.copy()
            for records in (self.streamed, self.logprobs, self.prompt_logprobs):
                records[key] = []
        self.scheduler.check_invariants()
        return request

    def abort(self, request_id: str, index: int | None = None) -> list[RequestUpdate]:
        updates = self.scheduler.abort(request_id, index)
        self._note(updates)
        return updates

    def reset_weights(self) -> None:
        self.device.weights += 1
        self.scheduler.reset_prefix_cache()
        self.scheduler.check_invariants()

    def step(self) -> list[RequestUpdate]:
        """Schedules and launches a step, takes in the one that is due, and samples the one launched."""
        self.now += 1.0
        live = [request for samples in self.scheduler._requests.values() for request in samples]
        before = {request: request.num_inflight_tokens for request in live}
        # What ends by itself leaves nothing to schedule, but an update.
        idle = self.scheduler.num_waiting + self.scheduler.num_running and not self.pending
        open_ended = any(step.num_steps > 1 for step, _ in self.pending)  # where it leads to is not known yet
        step = self.last_step = None if open_ended else self.scheduler.schedule(self.max_steps)
        self.scheduler.check_invariants()
        live = self.scheduler.num_waiting + self.scheduler.num_running
        assert step or not (idle and live), "there is work, nothing is in flight, and nothing was scheduled"
        if step:
            self._check_step(step, before)
            self.device.launch(step)
        else:
            self.device.drop(self.scheduler.take_dropped())
        # A mask is known when all tokens before it are; the engine is never more than one step ahead.
        ahead = min(self.overlap, 1) if step and step.masked else self.overlap
        updates: list[RequestUpdate] = []
        while self.pending and (not step or len(self.pending) >= max(ahead, 1)):
            updates += self._update()
            if not step:
                break
        if step:
            self.pending.append((step, self._sample(step, updates)))
            if not self.overlap:
                updates += self._update()
        updates += self.scheduler.drain()
        self._note(updates)
        return updates

    def run(self, limit: int = 3000) -> None:
        """Steps until nothing is left to do."""
        while self.scheduler.has_work or self.pending:
            self.step()
            limit -= 1
            assert limit, "requests that never end"
        assert not self.manager.num_used_blocks, "blocks are lost"
        assert not self.scheduler._residency.host_pool.num_used_blocks, "host blocks are lost"
        assert not self.device.host, "host copies are left"

    def check_solo(self, *keys: str) -> None:
        """Each sample streamed exactly what it would have alone; one that was cut short, a part of it."""
        for key in keys or self.finished:
            request, update = self.requests[key], self.finished[key]
            if request.pooling is not None:
                whole = update.finish_reason != "abort"
                assert update.embedding == (solo_vector(request, self.device.weights) if whole else None), key
                assert update.finish_reason in ("stop", "abort") and not self.streamed[key]
                continue
            if request.params.use_beam_search:
                self._check_beam(key, request, update)
                continue
            output, reason = solo(request, self.sample, self.device.weights, self.grammars.get(key))
            if update.finish_reason == "abort":
                assert self.streamed[key] == output[: len(self.streamed[key])] == request.output_token_ids, key
            else:
                assert self.streamed[key] == output == request.output_token_ids, key
                assert update.finish_reason == reason == request.finish_reason
            if request.params.prompt_logprobs is not None:
                expected = prompt_logprobs(request, self.device.weights) if not request.index else []
                got = self.prompt_logprobs[key]
                whole = update.finish_reason not in ("abort", "error") or request.num_output_tokens
                assert got == (expected if whole else expected[: len(got)]), key
            if request.params.num_logprobs is not None:
                assert len(self.logprobs[key]) == len(self.streamed[key])

    def _check_beam(self, key: str, request: Request, update: RequestUpdate) -> None:
        if update.finish_reason == "abort":
            return
        best = solo_beams(request, self.device.vocab_size, self.device.weights)[update.index]
        assert self.streamed[key] == best.token_ids, key
        assert (update.finish_reason, update.stop_reason) == (best.finish_reason, best.stop_reason)
        assert update.logprobs == best.logprobs
        if request.params.prompt_logprobs is not None and not update.index:
            assert self.prompt_logprobs[key] == prompt_logprobs(request, self.device.weights)

    def _update(self) -> list[RequestUpdate]:
        updates = self.scheduler.update(*self.pending.popleft())
        self.scheduler.check_invariants()
        return updates

    def _sample(self, step: Step, updates: list[RequestUpdate]) -> StepResult:
        """Fills the masks and samples, as the engine does."""
        allowed: dict[int, list[int]] = {}
        for row in step.masked:
            request, mask = step.requests[row], [0]
            if request.status is not Status.FINISHED:
                assert request.grammar is not None
                try:
                    request.grammar.fill(mask)
                except ValueError as error:
                    updates.append(self.scheduler.fail(request, str(error)))
            allowed[row] = mask
        return self.device.sample_rows(step, allowed)

    def _note(self, updates: list[RequestUpdate]) -> None:
        self.scheduler.check_invariants()
        for update in updates:
            key = key_of(update.request_id, update.index)
            assert key not in self.finished, "an update after the last"
            self.streamed[key] += update.new_token_ids
            self.logprobs[key] += update.logprobs or []
            self.prompt_logprobs[key] += update.prompt_logprobs or []
            if update.finish_reason:
                assert self.requests[key].status is Status.FINISHED
                self.finished[key] = update

    def _check_step(self, step: Step, inflight: dict[Request, int]) -> None:
        rows, scheduler = len(step.requests), self.scheduler
        assert 0 < rows <= scheduler.max_num_seqs
        assert step.total_tokens == sum(step.num_tokens) <= scheduler.max_num_batched_tokens
        assert min(step.num_tokens) >= 1, "an empty row"
        assert len(set(step.slots)) == rows and len(set(step.requests)) == rows
        ones = [n == 1 for n in step.num_tokens]
        assert ones == sorted(ones, reverse=True), "one-token rows come first"
        assert len(step.new_blocks) <= step.total_tokens // self.manager.block_size + rows
        for row, (request, slot, start, n, samples) in enumerate(
            zip(step.requests, step.slots, step.starts, step.num_tokens, step.samples, strict=True)
        ):
            assert request.slot == slot and request.status is Status.RUNNING
            ends = start + n == request.num_tokens + inflight[request]
            assert samples == (ends and request.pooling is None)
            assert request.num_inflight_tokens == inflight[request] + ends * step.num_steps
            assert start + n + step.num_steps - 1 < request.max_total_tokens, "feeds its last token"
            assert (row in step.masked) == (samples and request.grammar is not None)
        for admission in step.admissions:
            assert admission.request in step.requests
        self._check_writable(step)

    def _check_writable(self, step: Step) -> None:
        """A block that is not full is nobody else's: its holder will write there."""
        size = self.manager.block_size
        for request, start, n in zip(step.requests, step.starts, step.num_tokens, strict=True):
            if (start + n + step.num_steps - 1) % size:
                assert self.manager._refs[request.block_ids[-1]] == 1, "will write to a shared block"
