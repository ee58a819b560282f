"""Host time of a step: scheduler, block manager and batch packing, with no device.

    python -m benchmarks.host_overhead --json benchmarks/results/host_overhead.json

Two loads. *decode*: every request generates, nothing comes or goes. *churn*: requests of 128 tokens in and 128 out,
each replaced when it ends, so that steps also admit, hash, cut prompts into chunks and free. Steps overlap as in the
engine: each is scheduled before the result of the one before it arrives. Times are medians over steps, in ms.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.step import Step, StepResult
from jaxpaged.device.batch import pack
from jaxpaged.device.buckets import bucket_table
from jaxpaged.device.slots import pack_admission

BLOCK_SIZE = 16
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128
WARM_UP_STEPS = 50
STAGES = ("schedule", "pack", "update")
COLUMNS = {"load": "load", "num_running": "running", **{f"{s}_ms": f"{s} ms" for s in STAGES}}
COLUMNS |= {"total_ms": "total ms", "total_p99_ms": "total p99 ms"}


class Load:
    """A scheduler kept busy with `num_running` requests.

    Args:
      num_steps: how many steps will be timed; decode-only requests last longer than that.
      churn: whether requests end and are replaced.
    """

    def __init__(self, num_running: int, num_steps: int, *, churn: bool):
        self.num_running, self.churn = num_running, churn
        self.output_tokens = OUTPUT_TOKENS if churn else num_steps + 4 * WARM_UP_STEPS + num_running
        self.max_model_len = 2 * PROMPT_TOKENS + self.output_tokens
        max_tokens = max(8192, num_running)
        blocks_each = -(-(2 * PROMPT_TOKENS + self.output_tokens) // BLOCK_SIZE)
        self.scheduler = Scheduler(
            BlockManager(num_running * (blocks_each + 2), BLOCK_SIZE, enable_prefix_caching=True),
            max_num_seqs=num_running,
            max_num_batched_tokens=max_tokens,
            max_model_len=self.max_model_len,
        )
        self.buckets = bucket_table(num_running, max_tokens, "gpu")
        self._random = random.Random(0)
        self._names = itertools.count()
        for i in range(num_running):
            # Spread over the phases of their lives, so that no step is special.
            self.add(PROMPT_TOKENS + i % BLOCK_SIZE, 1 + i * OUTPUT_TOKENS // num_running if churn else None)

    def add(self, prompt_tokens: int = PROMPT_TOKENS, output_tokens: int | None = None) -> None:
        """Queues one more request."""
        prompt = self._random.choices(range(50_000), k=prompt_tokens)
        params = SamplingParams(max_tokens=output_tokens or self.output_tokens)
        self.scheduler.add(
            Request(str(next(self._names)), prompt, params, max_model_len=self.max_model_len, eos_token_ids=(50_000,))
        )

    def pack(self, step: Step) -> None:
        """What the runner does on the host with a step: its arrays, and those of the requests that it admits."""
        for admission in step.admissions:
            pack_admission(admission, self.max_model_len, -(-self.max_model_len // BLOCK_SIZE))
        bucket = self.buckets.pick(len(step.slots), step.total_tokens)
        pack(step, bucket, scratch_slot=self.num_running, block_size=BLOCK_SIZE)

    def times(self, num_steps: int) -> list[tuple[float, float, float]]:
        """Seconds of each stage in `num_steps` steps."""
        scheduler, clock = self.scheduler, time.perf_counter
        times = []
        previous = scheduler.schedule()
        while len(times) < num_steps + WARM_UP_STEPS:
            start = clock()
            step = scheduler.schedule()
            scheduled = clock()
            assert step and previous, "the load ran dry"
            self.pack(step)
            packed = clock()
            result = StepResult([[7] if samples else [] for samples in previous.samples])
            collected = clock()
            updates = scheduler.update(previous, result)
            times.append((scheduled - start, packed - scheduled, clock() - collected))
            for update in updates:
                if update.finish_reason:
                    self.add()
            previous = step
        assert self.churn or (previous and previous.total_tokens == self.num_running), "not every request decodes"
        return times[WARM_UP_STEPS:]


def measure(num_running: int, num_steps: int, *, churn: bool) -> dict[str, Any]:
    """One row of the table: medians in milliseconds, and the 99th percentile of their sum."""
    times = Load(num_running, num_steps, churn=churn).times(num_steps)
    totals = sorted(sum(stages) for stages in times)
    medians = {f"{name}_ms": 1e3 * statistics.median(t[i] for t in times) for i, name in enumerate(STAGES)}
    return {
        "load": "churn" if churn else "decode",
        "num_running": num_running,
        **medians,
        "total_ms": 1e3 * statistics.median(totals),
        "total_p99_ms": 1e3 * totals[int(0.99 * len(totals))],
    }


def main() -> None:
    """Measures, prints a table, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024], help="numbers of running requests")
    parser.add_argument("--steps", type=int, default=500, help="steps to time for each")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    rows = [measure(n, args.steps, churn=churn) for churn in (False, True) for n in args.running]
    print(record.table(rows, COLUMNS))
    print("times in ms per step")
    if args.json:
        record.save(record.record("host_overhead", rows, steps=args.steps, block_size=BLOCK_SIZE), args.json)


if __name__ == "__main__":
    main()
