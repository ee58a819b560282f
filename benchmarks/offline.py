"""Throughput and single-stream speed of jaxpaged, offline.

    python -m benchmarks.offline --model demo
    python -m benchmarks.offline --config llama-3.2-1b --dtype bfloat16 --num-prompts 16 --output-len 64

Prompts are random token ids, greedy, the end of the sequence ignored: every run does the same work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks import offline_options, record
from jaxpaged import LLM, SamplingParams


def measure(llm: LLM, count: int, input_len: int, output_len: int, repeat: int) -> dict[str, Any]:
    """Times `repeat` runs of `count` requests and returns medians.

    Prefill is timed alone, as the same prompts with one token out. Prompts differ between runs, so that
    the prefix cache has nothing to give.
    """
    vocab_size = llm.engine.vocab_size
    seconds: dict[int, list[float]] = {1: [], output_len: []}
    before = llm.engine.num_compilations
    for run in range(2 * repeat):
        tokens = output_len if run % 2 else 1
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        prompts = offline_options.random_prompts(count, input_len, vocab_size, seed=run)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds[tokens].append(time.perf_counter() - start)
        made = [len(output.token_ids) for output in outputs]
        if made != [tokens] * count:
            raise RuntimeError(f"asked for {count} outputs of {tokens} tokens, got lengths {sorted(set(made))}")
    total, prefill = statistics.median(seconds[output_len]), statistics.median(seconds[1])
    return {
        "num_prompts": count,
        "input_len": input_len,
        "output_len": output_len,
        "seconds": total,
        "seconds_all": seconds[output_len],
        "output_tokens_per_s": count * output_len / total,
        "total_tokens_per_s": count * (input_len + output_len) / total,
        "prefill_tokens_per_s": count * input_len / prefill,
        "decode_ms_per_token": 1e3 * (total - prefill) / (output_len - 1),
        "compilations": llm.engine.num_compilations - before,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    offline_options.add_options(parser, num_prompts=(32, 1), input_len=128, output_len=128, repeat=3)
    parser.add_argument("--implementation", help="attention implementation (default: the platform's best)")
    return offline_options.parse(parser)


def main() -> None:
    args = arguments()
    options: dict[str, Any] = {
        "max_model_len": max(256, args.input_len + args.output_len),
        "max_num_seqs": max(args.num_prompts),
        "attention_implementation": args.implementation,
    }
    with offline_options.model(args) as (model, of_model):
        start = time.perf_counter()
        llm = LLM(model, **of_model, **options)
        start_seconds = time.perf_counter() - start
        rows = [measure(llm, count, args.input_len, args.output_len, args.repeat) for count in args.num_prompts]
    columns = {
        "num_prompts": "requests",
        "output_tokens_per_s": "output tok/s",
        "total_tokens_per_s": "all tok/s",
        "prefill_tokens_per_s": "prefill tok/s",
        "decode_ms_per_token": "ms/step",
        "compilations": "compilations",
    }
    settings = offline_options.settings(args)
    result = record.record(
        "offline",
        rows,
        **settings | {"dtype": llm.engine.config.dtype, "devices": record.devices()},
        start_seconds=start_seconds,
        programs=llm.engine.num_programs,
    )
    name = args.config or args.model
    print(f"{name}, {llm.engine.config.dtype}, {args.input_len} in, {args.output_len} out, on {record.devices()[0]}")
    print(record.table(rows, columns))
    print(json.dumps({"versions": result["versions"], "commit": result["commit"]}))
    if args.json:
        record.save(result, args.json)


if __name__ == "__main__":
    main()
