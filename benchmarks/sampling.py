"""What sampling costs in a decode step, with a large vocabulary and random weights.

    python -m benchmarks.sampling --json benchmarks/results/sampling.json

Three kinds of steps take turns in one process: their tokens come from a bare argmax of the logits, from the engine's
sampling of greedy requests, and from that of random ones (temperature 0.8, top_p 0.9). Random weights make flat
distributions, so that top-p keeps most of the vocabulary: the dearest case. A step is timed from its launch until its
tokens are there; times are medians, ratios are medians of the repetitions' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import record
from jaxpaged import models
from jaxpaged.config import EngineConfig
from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import Admission, Step
from jaxpaged.device import batch
from jaxpaged.device.abstract_step import hf_config
from jaxpaged.device.buckets import BucketTable
from jaxpaged.device.draw import argmax
from jaxpaged.device.runner import Runner

BLOCK_SIZE = 16
CONTEXT = 128
KINDS = {
    "argmax": SamplingParams(temperature=0, max_tokens=None),
    "greedy": SamplingParams(temperature=0, max_tokens=None),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9, max_tokens=None),
}
COLUMNS = {"rows": "rows", **{f"{kind}_ms": f"{kind} ms" for kind in KINDS}}
COLUMNS |= {"greedy_over_argmax": "greedy / argmax", "top_p_over_greedy": "top_p / greedy"}


def make_runner(model: str, num_rows: list[int], num_steps: int) -> Runner:
    """A runner of the model with random weights, for decode steps of so many rows."""
    hf = hf_config(model)
    family = models.get_family(hf["model_type"])
    most, max_len = max(num_rows), CONTEXT + num_steps + BLOCK_SIZE
    shape = family.config_from_hf(hf).for_context(max_len)
    module = family.module(config=shape, dtype=jnp.dtype("float32"))
    config = EngineConfig(
        dtype="float32",
        kv_cache_dtype="float32",
        max_model_len=max_len,
        max_num_seqs=most,
        max_num_batched_tokens=2 * most,
        block_size=BLOCK_SIZE,
        num_kv_blocks=most * blocks_each(max_len),
    )
    buckets = BucketTable(num_rows, [2 * most], most)
    return Runner(module, models.random_params(module), config, vocab_size=shape.vocab_size, buckets=buckets)


def blocks_each(max_len: int) -> int:
    """Blocks of a request that fills the context."""
    return -(-max_len // BLOCK_SIZE)


def step_times(runner: Runner, num_rows: int, num_steps: int, params: SamplingParams) -> list[float]:
    """Seconds of decode steps of requests with `CONTEXT` tokens; what is in their KV pages does not matter."""
    max_len = runner.config.max_model_len
    assert max_len
    requests = [Request(str(i), range(CONTEXT), params, max_model_len=max_len, seed=i) for i in range(num_rows)]
    count = blocks_each(max_len)
    admissions = [Admission(i, r, list(range(1 + i * count, 1 + (i + 1) * count))) for i, r in enumerate(requests)]
    times = []
    for i in range(num_steps + 1):
        step = Step(
            requests=requests,
            slots=list(range(num_rows)),
            starts=[CONTEXT - 1 + i] * num_rows,
            num_tokens=[1] * num_rows,
            samples=[True] * num_rows,
            admissions=admissions if i == 0 else [],
            total_tokens=num_rows,
        )
        start = time.perf_counter()
        runner.collect(runner.launch(step))
        times.append(time.perf_counter() - start)
    return times[1:]  # the first one admits


def only_argmax(slots: Any, logits: jax.Array, rows: batch.SampleRows) -> Any:
    """Stands in for the engine's sampling of greedy requests."""
    tokens = argmax(logits)[0]
    return batch.record_tokens(slots, rows, tokens), tokens


def measure(runner: Runner, num_rows: int, num_steps: int, repetitions: int) -> dict[str, Any]:
    """One row of the table."""
    step_times(runner, num_rows, 1, KINDS["greedy"])  # compiles
    buckets, plain = runner.buckets, runner.samplers.plain
    num_logits = buckets.result_sizes(buckets.pick(num_rows, num_rows)).logits
    engine, bare = plain[num_logits], jax.jit(only_argmax, donate_argnums=0)
    medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for repetition in range(repetitions + 1):
        for kind, params in KINDS.items():
            plain[num_logits] = bare if kind == "argmax" else engine  # pyright: ignore[reportArgumentType]
            median = statistics.median(step_times(runner, num_rows, num_steps, params))
            if repetition:  # the first is to warm up
                medians[kind].append(median)
    plain[num_logits] = engine

    def ratio(kind: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(medians[kind], medians[base], strict=True))

    return {
        "rows": num_rows,
        **{f"{kind}_ms": 1e3 * statistics.median(times) for kind, times in medians.items()},
        "greedy_over_argmax": ratio("greedy", "argmax"),
        "top_p_over_greedy": ratio("top_p", "greedy"),
    }


def main() -> None:
    """Measures, prints a table, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b", help="a config.json, or the name of a well-known model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="rows of the steps")
    parser.add_argument("--steps", type=int, default=8, help="steps of each kind in a repetition")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    runner = make_runner(args.model, args.rows, args.steps)
    rows = [measure(runner, n, args.steps, args.repetitions) for n in args.rows]
    print(record.table(rows, COLUMNS))
    if args.json:
        settings = {"model": args.model, "steps": args.steps, "repetitions": args.repetitions}
        record.save(record.record("sampling", rows, devices=record.devices(), **settings), args.json)


if __name__ == "__main__":
    main()
