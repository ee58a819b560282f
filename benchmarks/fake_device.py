"""A real engine on a device that only takes time, for measuring what the host does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from jaxpaged.config import EngineConfig, resolve
from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.step import Step, StepResult
from jaxpaged.device.batch import pack
from jaxpaged.device.buckets import bucket_table
from jaxpaged.device.runner import Runner
from jaxpaged.device.slots import features, pack_admission
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.load import step_sizes

BLOCK_SIZE = 16
VOCAB_SIZE = 50_000


class Clock(Protocol):
    """Seconds since some time."""

    def now(self) -> float: ...
    def wait_until(self, end: float) -> None: ...


class WallClock:
    """The usual time."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, end: float) -> None:
        while (left := end - self.now()) > 0:
            time.sleep(left)


class ThreadClock:
    """Runs while this thread computes, and jumps where it would wait: what else the machine does matters little."""

    def __init__(self) -> None:
        self._waited = 0.0

    def now(self) -> float:
        return time.thread_time() + self._waited

    def wait_until(self, end: float) -> None:
        self._waited += max(0.0, end - self.now())


class FakeDevice:
    """Runs what is queued, one step after the other, each for as long.

    Attributes:
      busy_s, idle_s: seconds since the first launch that it has had something to run, and that it has not.
      num_late: launches for which it had to wait.
    """

    def __init__(self, step_s: float, clock: Clock):
        self._step_s, self._clock = step_s, clock
        self._free_at: float | None = None
        self.busy_s = self.idle_s = 0.0
        self.num_late = 0

    def queue(self) -> float:
        """Queues a step. Returns when it will have run."""
        now = self._clock.now()
        free_at = now if self._free_at is None else self._free_at
        self.idle_s += max(0.0, now - free_at)
        self.num_late += now > free_at
        self.busy_s += self._step_s
        self._free_at = max(now, free_at) + self._step_s
        return self._free_at

    def wait_until(self, time: float) -> None:
        """Returns at that time."""
        self._clock.wait_until(time)


class Queued(NamedTuple):
    """A step on its way.

    Attributes:
      tokens: i32[R], as a device would give them.
      done_at: when it has run.
    """

    step: Step
    tokens: np.ndarray
    done_at: float
    num_padding_tokens: int


class FakeRunner:
    """Does on the host what `Runner` does, and calls no program; every token is the same.

    Args:
      config: resolved options.
    """

    num_programs = recompilations = 0

    def __init__(self, config: EngineConfig, device: FakeDevice):
        assert config.max_num_seqs and config.max_num_batched_tokens and config.max_model_len
        self.config, self.device = config, device
        self.buckets = bucket_table(config.max_num_seqs, config.max_num_batched_tokens, "gpu")
        self.module = SimpleNamespace(config=SimpleNamespace(hidden_size=8))
        self._max_pages = -(-config.max_model_len // BLOCK_SIZE)

    def pack_options(self, request: Request) -> None:
        """No request has any."""
        del request

    def launch(self, step: Step) -> Queued:
        """As `Runner.launch`."""
        config = self.config
        assert config.max_model_len and config.max_num_seqs
        for admission in step.admissions:
            used = features(admission.request, config.logprobs_mode)
            pack_admission(admission, used, config.max_model_len, self._max_pages)
        bucket = self.buckets.pick(len(step.slots), step.total_tokens)
        pack(step, bucket, scratch_slot=config.max_num_seqs, block_size=BLOCK_SIZE)
        tokens = np.full(bucket.rows, 7, np.int32)
        return Queued(step, tokens, self.device.queue(), bucket.tokens - step.total_tokens)

    def collect(self, launched: Queued) -> StepResult:
        """As `Runner.collect`."""
        self.device.wait_until(launched.done_at)
        tokens = iter(launched.tokens.tolist())
        return StepResult([[next(tokens)] if samples else [] for samples in launched.step.samples])

    def drop(self, keys: Sequence[int]) -> None:
        """Nothing is ever copied to the host."""
        assert not keys


def fake_engine(num_running: int, device: FakeDevice, *, max_model_len: int, num_blocks: int, **options: Any) -> Engine:
    """An engine for so many requests at once, with the limits and buckets of GPUs.

    Args:
      options: of `EngineConfig`.
    """
    config = resolve(
        EngineConfig(max_num_seqs=num_running, max_model_len=max_model_len, **options),
        platform="gpu",
        native_bfloat16=True,
        checkpoint_dtype="bfloat16",
        model_max_len=max_model_len,
    )
    assert config.max_num_batched_tokens
    runner = FakeRunner(config, device)
    scheduler = Scheduler(
        BlockManager(num_blocks, BLOCK_SIZE),
        max_num_seqs=num_running,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        step_sizes=step_sizes(runner.buckets),
    )
    return Engine(scheduler, cast(Runner, runner), config, vocab_size=VOCAB_SIZE, eos_token_ids=(VOCAB_SIZE - 1,))
