"""What several decode steps in one program bring: the same requests with and without, in turns.

    python -m benchmarks.decode_steps --model demo
    python -m benchmarks.decode_steps --config one-layer-llama --dtype float32 --max-decode-steps 1 2 8

An engine for each of `--max-decode-steps`, all in this process. A run is two calls of `LLM.generate` with as many
greedy requests, all at once, whose ends are ignored: one with a single token each and one with `--output-len`, on
prompts of their own. A step's time is the difference of the two by the number of steps between them, `--output-len`
less one: so without the prompts, but with all that the host does, detokenizing included. The engines take turns; the
first run of each is not counted, and medians of the others are shown. The wall time is what users get. The CPU time, of
all threads of the process, tells what the host is spared also where others use the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import offline_options, record
from jaxpaged import LLM, SamplingParams


def run(llm: LLM, count: int, input_len: int, output_len: int, seed: int) -> tuple[float, float]:
    """Seconds of wall and of CPU time a decode step, of `count` greedy requests.

    What the same prompts take with one token is taken off.
    """
    seconds = []
    for tokens in (1, output_len):
        prompts = offline_options.random_prompts(count, input_len, llm.engine.vocab_size, seed=2 * seed + (tokens > 1))
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter(), time.process_time()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    wall, cpu = ((b - a) / (output_len - 1) for a, b in zip(*seconds, strict=True))
    return wall, cpu


def compare(llms: Sequence[LLM], count: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row an engine: medians of runs in turns."""
    times: list[list[tuple[float, float]]] = [[] for _ in llms]
    for turn in range(args.repeat + 1):  # the first one warms caches
        for llm, of_this in zip(llms, times, strict=True):
            of_this.append(run(llm, count, args.input_len, args.output_len, turn))
    rows = []
    for llm, of_this in zip(llms, times, strict=True):
        wall, cpu = zip(*of_this[1:], strict=True)
        rows.append(
            {
                "num_prompts": count,
                "max_decode_steps": llm.engine.config.max_decode_steps,
                "step_ms": 1e3 * statistics.median(wall),
                "step_ms_least": 1e3 * min(wall),
                "cpu_ms": 1e3 * statistics.median(cpu),
                "compilations": llm.engine.num_compilations,
            }
        )
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    offline_options.add_options(parser, num_prompts=(1, 32), input_len=64, output_len=129, repeat=5)
    parser.add_argument("--max-decode-steps", type=int, nargs="+", default=[1, 8], help="an engine each")
    return offline_options.parse(parser)


def main() -> None:
    args = arguments()
    options: dict[str, Any] = {
        "max_model_len": args.input_len + args.output_len,
        "max_num_seqs": max(args.num_prompts),
        "use_tqdm": False,
    }
    with offline_options.model(args) as (model, of_model):
        options |= of_model
        llms = [
            LLM(model, max_decode_steps=steps, kv_cache_bytes=1 << 28, **options) for steps in args.max_decode_steps
        ]
        rows = [row for count in args.num_prompts for row in compare(llms, count, args)]
    columns = {
        "num_prompts": "requests",
        "max_decode_steps": "steps at once",
        "step_ms": "ms/step",
        "step_ms_least": "least",
        "cpu_ms": "CPU ms/step",
        "compilations": "compilations",
    }
    print(record.table(rows, columns))
    settings = offline_options.settings(args)
    programs = [llm.engine.num_programs for llm in llms]
    result = record.record("decode_steps", rows, **settings | {"devices": record.devices()}, programs=programs)
    if args.json:
        record.save(result, args.json)


if __name__ == "__main__":
    main()
