"""A device without tensors: what each slot of each page holds is one number that stands for a whole token prefix.

A key or value depends on its token and all tokens before it, and so does this number. A row that reads a stale,
foreign or unwritten slot therefore reads a wrong number, and is caught.
"""

import zlib
from collections import deque
from collections.abc import Callable, Sequence

from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.request import Request, Status
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.step import RequestUpdate, Step, StepResult

MASK = 2**64 - 1
Sampler = Callable[[int], list[int]]  # the last position's number -> the row's new tokens


def root_of(cache_salt: str | None) -> int:
    return 1 if cache_salt is None else 2 + zlib.crc32(cache_salt.encode())


def extend(prefix: int, token: int, weights: int = 0) -> int:
    """The number of a prefix one token longer, under these weights."""
    mixed = (prefix * 6364136223846793005 + (token + 1) * 1442695040888963407 + weights * 0x9E3779B97F4A7C15) & MASK
    return mixed ^ (mixed >> 29)


def greedy_of(vocab_size: int) -> Sampler:
    """A model: the next token is a function of the whole prefix."""
    return lambda prefix: [(prefix >> 17) % vocab_size]


def solo(request: Request, sample: Sampler, weights: int = 0) -> tuple[list[int], str]:
    """Output and finish reason of a request that runs alone, by definition."""
    prefix = root_of(request.cache_salt)
    for token in request.prompt_token_ids:
        prefix = extend(prefix, token, weights)
    output: list[int] = []
    while True:
        (token,) = sample(prefix)
        output.append(token)
        ends = token in request.eos_token_ids or token in request.stop_token_ids
        if ends and len(output) >= request.params.min_tokens:
            return output, "stop"
        if request.num_prompt_tokens + len(output) >= request.max_total_tokens:
            return output, "length"
        prefix = extend(prefix, token, weights)


class Slot:
    """What the device knows of a running request."""

    def __init__(self, request: Request, block_ids: Sequence[int]):
        self.history = list(request.all_token_ids)
        self.table = list(block_ids)
        self.root = root_of(request.cache_salt)
        self.prefixes: list[int] = []  # what its positions must hold


class SimulatedDevice:
    """Runs steps in order, all writes of a step before its reads, and checks every read."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, sample: Sampler):
        self.num_blocks, self.block_size, self.sample = num_blocks, block_size, sample
        self.weights = 0
        self.pages: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks + 1)]
        self.slots: list[Slot | None] = [None] * num_slots

    def run(self, step: Step) -> StepResult:
        for admission in step.admissions:
            self._admit(admission.request, admission.slot, admission.block_ids)
        for slot, index, block in step.new_blocks:
            table = self._slot(slot).table
            assert index == len(table), f"slot {slot}: block {index} comes after {len(table)}"
            assert 1 <= block <= self.num_blocks, f"block {block} is not in the pool"
            table.append(block)
        rows = list(zip(step.slots, step.starts, step.num_tokens, step.samples, strict=True))
        for slot, start, n, _ in rows:
            self._write(self._slot(slot), start, n)
        return StepResult([self._read(self._slot(slot), start, n, samples) for slot, start, n, samples in rows])

    def _admit(self, request: Request, slot: int, block_ids: Sequence[int]) -> None:
        state = self.slots[slot] = Slot(request, block_ids)
        prefix = state.root
        for token in state.history[: len(block_ids) * self.block_size]:
            prefix = extend(prefix, token, self.weights)
            state.prefixes.append(prefix)

    def _write(self, slot: Slot, start: int, n: int) -> None:
        assert start == len(slot.prefixes), f"starts at {start} with {len(slot.prefixes)} computed"
        prefix = slot.prefixes[-1] if slot.prefixes else slot.root
        for position in range(start, start + n):
            prefix = extend(prefix, slot.history[position], self.weights)
            slot.prefixes.append(prefix)
            self.pages[slot.table[position // self.block_size]][position % self.block_size] = prefix

    def _read(self, slot: Slot, start: int, n: int, samples: bool) -> list[int]:
        held = [value for block in slot.table for value in self.pages[block]][: start + n]
        assert held == slot.prefixes, "a row reads what is not its own"
        if not samples:
            return []
        assert start + n == len(slot.history), "samples before its end"
        tokens = self.sample(slot.prefixes[-1])
        slot.history += tokens
        return tokens

    def _slot(self, slot: int) -> Slot:
        state = self.slots[slot]
        assert state is not None, f"slot {slot} was never admitted"
        return state


class Driver:
    """The engine's loop over a simulated device, which checks all it can after every move.

    Args:
      overlap: 1 updates a step after the next one was scheduled, 0 at once.
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
        **manager_options,
    ):
        self.manager = BlockManager(num_blocks, block_size, enable_prefix_caching, **manager_options)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        self.sample = sample or greedy_of(vocab_size)
        self.device = SimulatedDevice(num_blocks, block_size, max_num_seqs, self.sample)
        self.overlap, self.max_model_len = overlap, max_model_len
        self.pending: deque[tuple[Step, StepResult]] = deque()
        self.requests: dict[str, Request] = {}
        self.streamed: dict[str, list[int]] = {}
        self.finished: dict[str, RequestUpdate] = {}
        self.last_step: Step | None = None

    def add(self, request_id: str, prompt: Sequence[int], *, eos=(), cache_salt=None, **params) -> Request:
        request = Request(
            request_id,
            prompt,
            SamplingParams(**params),
            max_model_len=self.max_model_len,
            eos_token_ids=eos,
            cache_salt=cache_salt,
        )
        self.scheduler.add(request)
        self.requests[request_id] = request
        self.streamed[request_id] = []
        self.scheduler.check_invariants()
        return request

    def abort(self, request_id: str) -> RequestUpdate | None:
        update = self.scheduler.abort(request_id)
        self.scheduler.check_invariants()
        if update is not None:
            self._note(update)
        return update

    def reset_weights(self) -> None:
        self.device.weights += 1
        self.scheduler.reset_prefix_cache()
        self.scheduler.check_invariants()

    def step(self) -> list[RequestUpdate]:
        """Schedules and launches a step, and takes in the one that is due."""
        before = {request: request.num_inflight_tokens for request in self.requests.values()}
        idle = self.scheduler.has_work and not self.pending
        step = self.last_step = self.scheduler.schedule()
        self.scheduler.check_invariants()
        assert step or not idle, "there is work, nothing is in flight, and nothing was scheduled"
        if step:
            self._check_step(step, before)
            self.pending.append((step, self.device.run(step)))
        if not self.pending or (step and len(self.pending) <= self.overlap):
            return []
        updates = self.scheduler.update(*self.pending.popleft())
        self.scheduler.check_invariants()
        for update in updates:
            self._note(update)
        return updates

    def run(self, limit: int = 3000) -> None:
        """Steps until nothing is left to do."""
        while self.scheduler.has_work or self.pending:
            self.step()
            limit -= 1
            assert limit, "requests that never end"
        assert not self.manager.num_used_blocks, "blocks are lost"

    def check_solo(self, *request_ids: str) -> None:
        """Each request streamed exactly what it would have alone."""
        for request_id in request_ids or self.finished:
            request, update = self.requests[request_id], self.finished[request_id]
            output, reason = solo(request, self.sample, self.device.weights)
            assert self.streamed[request_id] == output == request.output_token_ids
            assert update.finish_reason == reason == request.finish_reason

    def _note(self, update: RequestUpdate) -> None:
        assert update.request_id not in self.finished, "an update after the last"
        self.streamed[update.request_id] += update.new_token_ids
        if update.finish_reason:
            assert self.requests[update.request_id].status is Status.FINISHED
            self.finished[update.request_id] = update

    def _check_step(self, step: Step, inflight: dict[Request, int]) -> None:
        rows, scheduler = len(step.requests), self.scheduler
        assert 0 < rows <= scheduler.max_num_seqs
        assert step.total_tokens == sum(step.num_tokens) <= scheduler.max_num_batched_tokens
        assert min(step.num_tokens) >= 1, "an empty row"
        assert len(set(step.slots)) == rows and len(set(step.requests)) == rows
        ones = [n == 1 for n in step.num_tokens]
        assert ones == sorted(ones, reverse=True), "one-token rows come first"
        assert len(step.new_blocks) <= step.total_tokens // self.manager.block_size + rows
        for request, slot, start, n, samples in zip(
            step.requests, step.slots, step.starts, step.num_tokens, step.samples, strict=True
        ):
            assert request.slot == slot and request.status is Status.RUNNING
            assert samples == (start + n == request.num_tokens + inflight[request])
            assert request.num_inflight_tokens == inflight[request] + samples
            assert start + n < request.max_total_tokens, "fed its last token"
        for admission in step.admissions:
            assert admission.request in step.requests
            assert len(admission.block_ids) * self.manager.block_size < admission.request.num_tokens
