"""Share of padding in what steps compute: the real scheduler and buckets, simulated arrivals, no device.

    python -m benchmarks.padding --json benchmarks/results/padding.json

Requests arrive as a Poisson process, as long as those of ShareGPT: the means are those of figure 11 of Kwon et al.,
"Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023), 161 tokens in and 338 out;
that they are log-normal, and how far they spread, is ours. The clock is a model of a step's time: so much for a step,
and so much for each token, padding included. Each machine is simulated with its platform's default limits and buckets,
and for comparison with powers of two and no prompt cut to fit them. Fewer than 8 rows are padded
on purpose on CPUs, which take longer for them in bfloat16, and on TPUs, which take as long.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record
from jaxpaged.config import EngineConfig, resolve
from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.step import Step, StepResult
from jaxpaged.device.buckets import BucketTable, bucket_table, least_decode_rows
from jaxpaged.engine.load import step_sizes

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
MEAN_INPUT, MEAN_OUTPUT = 161, 338
SPREAD_INPUT, SPREAD_OUTPUT = 1.2, 0.9  # standard deviations of the logarithms
COLUMNS = {
    "machine": "machine",
    "buckets": "buckets",
    "programs": "programs",
    "requests_per_s": "requests/s",
    "mean_running": "running, mean",
    "padding_percent": "padding, %",
    "padding_decode_percent": "in decoding steps, %",
    "padding_mixed_percent": "in others, %",
    "padding_time_percent": "of the time, %",
    "mean_ttft_ms": "TTFT ms, mean",
}


@dataclass(frozen=True)
class Machine:
    """What a step takes, and how many requests come.

    Attributes:
      platform: whose default limits and buckets are used.
      step_s: seconds of a step without any tokens: weights are read.
      token_s: seconds that each computed token takes besides.
      rates: requests a second, from few to almost too many.
    """

    name: str
    platform: str
    step_s: float
    token_s: float
    rates: tuple[float, ...]


MACHINES = (
    # 16 GB of weights at 85 % of 3.35 TB/s; 16 GFLOP a token at 600 TFLOP/s.
    Machine("Llama-3.1-8B, H100", "gpu", 5.6e-3, 27e-6, (2, 10, 25, 40, 45)),
    # The same weights at 85 % of 1.64 TB/s; 16 GFLOP a token at 60 % of 918 TFLOP/s.
    Machine("Llama-3.1-8B, TPU v6e", "tpu", 11.5e-3, 29e-6, (2, 10, 25, 35)),
    # As measured with 8 and 32 rows, in bfloat16 on two cores.
    Machine("demo model, CPU", "cpu", 19e-3, 1.0e-3, (0.1, 0.5, 1.0, 1.3)),
)


@dataclass(frozen=True)
class Arrival:
    at: float
    input_len: int
    output_len: int


def arrivals(count: int, rate: float) -> list[Arrival]:
    """The first requests of a Poisson process of so many a second, the same lengths at any rate."""
    times, lengths = random.Random(0), random.Random(1)
    now, made = 0.0, []
    for _ in range(count):
        now += times.expovariate(rate)
        input_len = _length(lengths, MEAN_INPUT, SPREAD_INPUT)
        made.append(Arrival(now, input_len, _length(lengths, MEAN_OUTPUT, SPREAD_OUTPUT)))
    return made


def _length(source: random.Random, mean: float, spread: float) -> int:
    drawn = source.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return min(max(round(drawn), 4), MAX_MODEL_LEN // 2)


class Simulation:
    """Serves requests on a machine's clock, steps overlapping as in the engine.

    Attributes:
      now: seconds since the start.
      tokens, padding: tokens computed, and those of them that were padding: of mixed steps, of decode-only ones.
      running: integral of the rows over time.
      ttfts: seconds to the first token, of each request that got one.
    """

    def __init__(self, machine: Machine, table: BucketTable, *, cuts: bool, seqs: int, tokens: int):
        self._machine, self._table = machine, table
        self.scheduler = Scheduler(
            BlockManager(seqs * MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE, enable_prefix_caching=False),
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=MAX_MODEL_LEN,
            step_sizes=step_sizes(table) if cuts else None,
            clock=lambda: self.now,
        )
        self.now = self.running = 0.0
        self.tokens, self.padding = [0, 0], [0, 0]
        self.ttfts: list[float] = []
        self._without_token: dict[str, Arrival] = {}

    def run(self, requests: Sequence[Arrival]) -> None:
        """Serves until the last one has arrived: what comes then is no longer that load."""
        scheduler, pending, coming = self.scheduler, None, list(reversed(requests))
        while coming:
            if pending is None and not scheduler.has_work:
                self.now = max(self.now, coming[-1].at)
            while coming and coming[-1].at <= self.now:
                self._add(coming.pop())
            step = scheduler.schedule()
            if step is not None:
                self._compute(step)
            if pending is not None:
                self._take_in(pending)
            pending = step

    def _add(self, arrival: Arrival) -> None:
        name = str(arrival.at)
        params = SamplingParams(max_tokens=arrival.output_len)
        self._without_token[name] = arrival
        self.scheduler.add(Request(name, [1] * arrival.input_len, params, max_model_len=MAX_MODEL_LEN))

    def _compute(self, step: Step) -> None:
        bucket = self._table.pick(len(step.slots), step.total_tokens)
        self.tokens[bucket.decode_only] += bucket.tokens
        self.padding[bucket.decode_only] += bucket.tokens - step.total_tokens
        seconds = self._machine.step_s + bucket.tokens * self._machine.token_s
        self.now += seconds
        self.running += len(step.slots) * seconds

    def _take_in(self, step: Step) -> None:
        """Seconds to the first token are until the step after has run: a step later than on a device."""
        for update in self.scheduler.update(step, StepResult([[7] if samples else [] for samples in step.samples])):
            if (arrival := self._without_token.pop(update.request_id, None)) is not None:
                self.ttfts.append(self.now - arrival.at)


def measure(machine: Machine, rate: float, count: int, *, plain: bool) -> dict[str, Any]:
    """One row of the table.

    Args:
      plain: with powers of two, and no prompt cut to fit them.
    """
    options = resolve(
        EngineConfig(),
        platform=machine.platform,
        native_bfloat16=True,
        checkpoint_dtype="bfloat16",
        model_max_len=MAX_MODEL_LEN,
    )
    seqs, tokens = options.max_num_seqs, options.max_num_batched_tokens
    assert seqs and tokens
    assert options.dtype
    least = least_decode_rows(machine.platform, options.dtype)
    table = bucket_table(seqs, tokens, machine.platform, min_decode_rows=least)
    if plain:
        powers = [2**i for i in range(14)]
        table = BucketTable(
            [n for n in powers if least <= n <= seqs], [n for n in powers if 16 <= n <= tokens], max_num_seqs=seqs
        )
    simulation = Simulation(machine, table, cuts=not plain, seqs=seqs, tokens=tokens)
    simulation.run(arrivals(count, rate))
    mixed, decode = (100 * p / t for p, t in zip(simulation.padding, simulation.tokens, strict=True))
    padding = sum(simulation.padding)
    return {
        "machine": machine.name,
        "buckets": "powers of two" if plain else "ours",
        "programs": len(table.all),
        "requests_per_s": rate,
        "mean_running": simulation.running / simulation.now,
        "padding_percent": 100 * padding / sum(simulation.tokens),
        "padding_decode_percent": decode,
        "padding_mixed_percent": mixed,
        "padding_time_percent": 100 * padding * machine.token_s / simulation.now,
        "mean_ttft_ms": 1e3 * sum(simulation.ttfts) / len(simulation.ttfts),
    }


def main() -> None:
    """Simulates, prints a table, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="requests of each load")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    rows = [
        measure(machine, rate, args.requests, plain=plain)
        for machine in MACHINES
        for plain in (True, False)
        for rate in machine.rates
    ]
    print(record.table(rows, COLUMNS))
    if args.json:
        record.save(record.record("padding", rows, requests=args.requests), args.json)


if __name__ == "__main__":
    main()
