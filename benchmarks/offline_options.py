"""What the offline benchmarks share: which model they run, and greedy requests of random tokens."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import configs


def add_options(
    parser: argparse.ArgumentParser, *, num_prompts: Sequence[int], input_len: int, output_len: int, repeat: int
) -> None:
    """The flags of all of them, with these defaults."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", default="demo", help="a model's name or folder (default: demo)")
    what.add_argument("--config", help="random weights of this config: a name in benchmarks/configs, or a config.json")
    parser.add_argument("--dtype", default="bfloat16", choices=("auto", "bfloat16", "float16", "float32"))
    parser.add_argument("--num-prompts", type=int, nargs="+", default=list(num_prompts), help="one measurement each")
    parser.add_argument("--input-len", type=int, default=input_len)
    parser.add_argument("--output-len", type=int, default=output_len)
    parser.add_argument("--repeat", type=int, default=repeat, help="runs of each; medians are shown")
    parser.add_argument("--json", type=Path, help="write the record here")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line's flags; it ends with a message where they make no sense."""
    args = parser.parse_args()
    if args.output_len < 2 or args.input_len < 1 or args.repeat < 1 or min(args.num_prompts) < 1:
        parser.error("--output-len must be at least 2; --input-len, --repeat and --num-prompts at least 1")
    return args


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as a record has them."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}


@contextlib.contextmanager
def model(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name or folder of `--model` or `--config`, and what `LLM` needs to be told besides."""
    if not args.config:
        yield args.model, {"dtype": args.dtype}
        return
    with model_folder(args.config) as folder:
        yield folder, {"dtype": args.dtype, "load_format": "dummy", "tokenizer": "demo"}


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


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` ids each, from the middle of the vocabulary: no special tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size // 100, vocab_size * 4 // 5) for _ in range(length)] for _ in range(count)]
