"""Throughput and single-stream speed of jaxpaged, offline.

    python -m benchmarks.offline --model demo
    python -m benchmarks.offline --config llama-3.2-1b --dtype bfloat16 --num-prompts 16 --output-len 64

Prompts are random token ids, greedy, the end of the sequence ignored: every run does the same work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import configs, record
from jaxpaged import LLM, SamplingParams


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` ids each, from the middle of the vocabulary: no special tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size // 100, vocab_size * 4 // 5) for _ in range(length)] for _ in range(count)]


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
        prompts = random_prompts(count, input_len, vocab_size, seed=run)
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


@contextlib.contextmanager
def model_folder(config: str) -> Iterator[str]:
    """A model folder that holds a config and no weights; see `configs.load`."""
    try:
        content = configs.load(config)
    except ValueError as error:
        raise SystemExit(f"--config {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(content))
        yield folder


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", default="demo", help="a model's name or folder (default: demo)")
    what.add_argument("--config", help="random weights of this config: a model's name, or a config.json")
    parser.add_argument("--dtype", default="bfloat16", choices=("auto", "bfloat16", "float16", "float32"))
    parser.add_argument("--num-prompts", type=int, nargs="+", default=[32, 1], help="one measurement each")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; medians are shown")
    parser.add_argument("--implementation", help="attention implementation (default: the platform's best)")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    if args.output_len < 2 or args.input_len < 1 or args.repeat < 1 or min(args.num_prompts) < 1:
        parser.error("--output-len must be at least 2; --input-len, --repeat and --num-prompts at least 1")
    return args


def main() -> None:
    args = arguments()
    options: dict[str, Any] = {
        "dtype": args.dtype,
        "max_model_len": max(256, args.input_len + args.output_len),
        "max_num_seqs": max(args.num_prompts),
        "attention_implementation": args.implementation,
    }
    with contextlib.ExitStack() as stack:
        model = args.model
        if args.config:
            model = stack.enter_context(model_folder(args.config))
            options |= {"load_format": "dummy", "tokenizer": "demo"}
        start = time.perf_counter()
        llm = LLM(model, **options)
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
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
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
