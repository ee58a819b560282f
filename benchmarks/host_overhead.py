"""Host time of a step: the real engine on a device that takes no time, and whether one that takes 5 ms is kept busy.

    python -m benchmarks.host_overhead --json benchmarks/results/host_overhead.json

Two loads. *decode*: every request generates, nothing comes or goes. *churn*: requests of 128 tokens in and 128 out,
each replaced when it ends, so that steps also admit, hash, cut prompts into chunks and free. The stages are those of
`Engine.step`: "pack" is what the runner does on the host to start a step, "collect" to read its tokens; no program is
called. "scheduler" is their sum without "collect". Besides: the message that takes a step's updates to the API process;
and, there, making outputs of them without detokenizing. Times are medians over steps, in ms.

Idle is the share of the time in which the device has nothing to run, though there is work, if a step takes it 5 ms. The
host encodes the message of each step meanwhile, in the same thread.
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
from benchmarks.fake_device import BLOCK_SIZE, VOCAB_SIZE, Clock, FakeDevice, WallClock, fake_engine
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import RequestUpdate
from jaxpaged.engine.garbage import collect_seldom
from jaxpaged.engine.messages import Updates, encode
from jaxpaged.engine.output_processor import OutputProcessor

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128
WARM_UP_STEPS = 50
DEVICE_S = 5e-3
STAGES = ("schedule", "pack", "collect", "update", "step", "message", "outputs")
COLUMNS = {
    "load": "load",
    "num_running": "running",
    **{f"{stage}_ms": f"{stage} ms" for stage in STAGES[:4]},
    "total_ms": "scheduler ms",
    "total_p99_ms": "p99 ms",
    "step_ms": "Engine.step ms",
    "message_ms": "message ms",
    "outputs_ms": "outputs ms",
    "idle_percent": "idle, %",
}


class Load:
    """An engine kept busy with `num_running` requests.

    Args:
      num_steps: how many steps there will be; decode-only requests last longer than that.
      churn: whether requests end and are replaced.
      outputs: makes outputs of what `step` gives; None where there are only rounds of `step_and_send`.
      options: of `EngineConfig`.
    """

    def __init__(
        self,
        num_running: int,
        num_steps: int,
        device: FakeDevice,
        *,
        churn: bool,
        outputs: OutputProcessor | None = None,
        **options: Any,
    ):
        self.churn = churn
        self.output_tokens = OUTPUT_TOKENS if churn else num_steps + 4 * WARM_UP_STEPS + num_running
        max_model_len = 2 * PROMPT_TOKENS + self.output_tokens
        num_blocks = num_running * (-(-max_model_len // BLOCK_SIZE) + 2)
        self.engine = fake_engine(num_running, device, max_model_len=max_model_len, num_blocks=num_blocks, **options)
        self.outputs = outputs
        self._tokens, self._serials = (
            random.Random(0).choices(range(VOCAB_SIZE - 1), k=2 * PROMPT_TOKENS),
            itertools.count(),
        )
        for i in range(num_running):
            # The first lives end one after the other, once the warm-up has admitted everybody: so no step is special.
            first_life = WARM_UP_STEPS + i * OUTPUT_TOKENS // num_running
            self.add(PROMPT_TOKENS + i % BLOCK_SIZE, first_life if churn else None)

    def add(self, prompt_tokens: int = PROMPT_TOKENS, output_tokens: int | None = None) -> None:
        """Queues one more request; no two prompts begin alike."""
        serial = next(self._serials)
        prompt = [serial, *self._tokens[: prompt_tokens - 1]]
        params = SamplingParams(
            max_tokens=output_tokens or self.output_tokens, detokenize=False, output_kind="delta", temperature=0.0
        )
        request = self.engine.make_request(f"cmpl-{serial:032x}", prompt, params)
        if self.outputs is not None:
            self.outputs.add(request)
        self.engine.add_request(request)

    def step(self) -> dict[str, float]:
        """Seconds of each stage of a step, and of what follows it in both processes."""
        clock = time.perf_counter
        start = clock()
        updates = self.engine.step()
        stepped = clock()
        stats = self.engine.stats
        encode(Updates(updates, stats, stepped))
        encoded = clock()
        assert self.outputs is not None
        self.outputs.process(updates, stepped)
        processed = clock()
        self._replace(updates)
        return {
            "schedule": stats.schedule_seconds,
            "pack": stats.launch_seconds,
            "collect": stats.collect_seconds,
            "update": stats.update_seconds,
            "total": stats.schedule_seconds + stats.launch_seconds + stats.update_seconds,
            "step": stepped - start,
            "message": encoded - stepped,
            "outputs": processed - encoded,
        }

    def step_and_send(self) -> None:
        """What a core does in a round of its loop."""
        updates = self.engine.step()
        encode(Updates(updates, self.engine.stats, 0.0))
        self._replace(updates)

    def _replace(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            if update.finish_reason:
                self.add()


def measure(num_running: int, num_steps: int, *, churn: bool) -> dict[str, Any]:
    """One row of the table: medians in milliseconds, and the 99th percentile of the scheduler's."""
    outputs = OutputProcessor(None, in_slices=True)
    load = Load(num_running, num_steps, FakeDevice(0.0, WallClock()), churn=churn, outputs=outputs)
    times = [load.step() for _ in range(num_steps + WARM_UP_STEPS)][WARM_UP_STEPS:]
    totals = sorted(t["total"] for t in times)
    return {
        "load": "churn" if churn else "decode",
        "num_running": num_running,
        **{f"{stage}_ms": 1e3 * statistics.median(t[stage] for t in times) for stage in (*STAGES, "total")},
        "total_p99_ms": 1e3 * totals[int(0.99 * len(totals))],
        "idle_percent": 100 * idle_share(num_running, num_steps, churn=churn, clock=WallClock()),
    }


def idle_share(num_running: int, num_steps: int, *, churn: bool, clock: Clock, **options: Any) -> float:
    """The share of its time that a device waits for its next step, though there is work; it takes `DEVICE_S` for one.

    Args:
      options: of `EngineConfig`.
    """
    device = FakeDevice(DEVICE_S, clock)
    load = Load(num_running, num_steps, device, churn=churn, **options)
    for _ in range(WARM_UP_STEPS):
        load.step_and_send()
    busy, idle = device.busy_s, device.idle_s
    for _ in range(num_steps):
        load.step_and_send()
    busy, idle = device.busy_s - busy, device.idle_s - idle
    return idle / (busy + idle)


def main() -> None:
    """Measures, prints a table, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024], help="numbers of running requests")
    parser.add_argument("--steps", type=int, default=500, help="steps to time for each")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    collect_seldom()  # as serving processes do
    rows = [measure(n, args.steps, churn=churn) for churn in (False, True) for n in args.running]
    print(record.table(rows, COLUMNS))
    if args.json:
        settings = {"steps": args.steps, "block_size": BLOCK_SIZE, "device_ms": 1e3 * DEVICE_S}
        record.save(record.record("host_overhead", rows, **settings), args.json)


if __name__ == "__main__":
    main()
