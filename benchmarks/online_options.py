"""The flags of `benchmarks.online`: those of `vllm bench serve` where they mean the same, and advice on others."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.latencies import METRICS
from benchmarks.workload import Ramp
from jaxpaged.text.tokenizer import Tokenizer

BACKENDS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
SAMPLING = ("--top-p", "--top-k", "--min-p", "--frequency-penalty", "--presence-penalty", "--repetition-penalty")
_NO_DATA = "prompts are random; give their lengths with --random-input-len and --random-output-len"
_WHOLE = "figures are of whole runs; --save-result keeps them"
# vLLM's flags that have no meaning here -> what to do.
ELSEWHERE = {
    **dict.fromkeys(("--dataset-path", "--sharegpt-output-len", "--sonnet-input-len", "--sonnet-output-len",
                     "--sonnet-prefix-len", "--custom-output-len", "--hf-name", "--hf-split", "--hf-subset",
                     "--hf-output-len", "--no-stream", "--no-oversample", "--disable-shuffle"), _NO_DATA),
    **dict.fromkeys(("--input-len", "--output-len"), "say --random-input-len and --random-output-len"),
    **dict.fromkeys(("--save-detailed", "--append-result", "--plot-timeline", "--label"), _WHOLE),
    "--use-beam-search": "say --extra-body '{\"use_beam_search\": true}'",
    "--logprobs": "say --extra-body '{\"logprobs\": 5}'",
    "--profile": "POST /start_profile and /stop_profile before and after",
    "--lora-modules": "there is no LoRA",
    "--insecure": "only http:// is spoken",
    "--trust-remote-code": "no code of models is run",
    "--tokenizer-mode": "there is one",
    "--skip-tokenizer-init": "none is read without --tokenizer",
    "--ready-check-timeout-sec": "start it when the server answers /health",
    "--request-id-prefix": "the server gives ids",
    "--extra-headers": "say --header KEY=VALUE",
}  # fmt: skip


class _Refused(argparse.Action):
    """A flag that is vLLM's alone."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(f"{self.option_strings[0]} is vLLM's and not built here: {self.const}")


def _resolve(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Sets what depends on several flags: endpoint, vocab_size, sampling and ramp."""
    wanted = BACKENDS[args.backend or "openai"]
    if args.backend and args.endpoint and args.endpoint != wanted:
        parser.error(f"--backend {args.backend} is --endpoint {wanted}, not {args.endpoint}")
    args.endpoint = args.endpoint or wanted
    if args.vocab_size is None:
        args.vocab_size = Tokenizer.from_name(args.tokenizer).vocab_size if args.tokenizer else 32_000
    names = ["temperature", *(flag.removeprefix("--").replace("-", "_") for flag in SAMPLING)]
    args.sampling = {name: value for name in names if (value := getattr(args, name)) is not None}
    ramp = (args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    wrong = None in ramp or args.request_rate != float("inf") or min(ramp[1:]) <= 0
    if ramp != (None, None, None) and wrong:
        parser.error("--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps, above 0, go together, and alone")
    args.ramp = None if None in ramp else Ramp(*ramp)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a run. Besides those that have flags:

    endpoint, vocab_size: resolved.
    sampling: fields of every body.
    metrics, percentiles, goals, ramp: as they are used.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.online",
        description="Loads an OpenAI-compatible server and measures what clients see.",
    )
    _add_server(parser.add_argument_group("server"))
    _add_load(parser.add_argument_group("load"))
    _add_results(parser.add_argument_group("results"))
    for name, advice in ELSEWHERE.items():
        parser.add_argument(name, nargs="*", action=_Refused, const=advice, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    _resolve(parser, args)
    if not (args.request_rate > 0 and args.burstiness > 0):
        parser.error("--request-rate and --burstiness must be above 0")
    if not 0 <= args.random_range_ratio < 1:
        parser.error(f"--random-range-ratio {args.random_range_ratio} must be at least 0 and below 1")
    if args.random_prefix_len < 0:
        parser.error("--random-prefix-len must be at least 0")
    if min(args.num_prompts, args.random_input_len, args.random_output_len, args.max_concurrency or 1) < 1:
        parser.error("--num-prompts, --random-input-len, --random-output-len and --max-concurrency must be at least 1")
    args.metrics = args.percentile_metrics.split(",")
    args.percentiles = [float(value) for value in args.metric_percentiles.split(",")]
    args.goals = dict(_goal(parser, text) for text in args.goodput)
    if unknown := [name for name in [*args.metrics, *args.goals] if name not in METRICS]:
        parser.error(f"unknown metric {unknown[0]!r}; there are {', '.join(METRICS)}")
    return args


def _add_server(group: Any) -> None:
    group.add_argument("--base-url", help="http://HOST:PORT (default: from --host and --port)")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=8000)
    group.add_argument("--backend", choices=tuple(BACKENDS), help="as --endpoint, in vLLM's words")
    group.add_argument("--endpoint", choices=tuple(sorted(set(BACKENDS.values()))), help="default: of the backend")
    group.add_argument("--model", help="the name that requests use (default: the first one that the server lists)")
    group.add_argument("--served-model-name", help="the same, where --model is a path or the like")
    group.add_argument("--tokenizer", help="where to read --vocab-size; prompts are token ids")
    group.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="sent with each request")
    group.add_argument("--timeout", type=float, default=600.0, help="seconds that an answer may take")


def _add_load(group: Any) -> None:
    group.add_argument("--dataset-name", choices=("random",), default="random", help="the one there is")
    group.add_argument("--num-prompts", type=int, default=1000)
    group.add_argument("--request-rate", type=float, default=float("inf"), help="a second; default: all at once")
    group.add_argument(
        "--burstiness", type=float, default=1.0, help="1: a Poisson process; less: bursts; more: more even"
    )
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="instead of --request-rate")
    group.add_argument("--ramp-up-start-rps", type=float, help="requests a second at the start")
    group.add_argument("--ramp-up-end-rps", type=float, help="and at the end")
    group.add_argument("--max-concurrency", type=int, help="requests at a time")
    group.add_argument("--num-warmups", type=int, default=0, help="requests sent before, not measured")
    group.add_argument("--random-input-len", type=int, default=1024, help="tokens; words, for chats")
    group.add_argument("--random-prefix-len", type=int, default=0, help="tokens before these, the same in all prompts")
    group.add_argument("--random-output-len", type=int, default=128)
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths from LEN*(1-R) to LEN*(1+R)"
    )
    group.add_argument(
        "--length-exponent",
        type=float,
        default=0.0,
        metavar="A",
        help="lengths from a power law, density ~ length**-A (default 0: uniform)",
    )
    group.add_argument("--vocab-size", type=int, help="prompts have ids below it (default: the tokenizer's, or 32000)")
    group.add_argument("--ignore-eos", action="store_true", help="every answer has its full length")
    group.add_argument("--temperature", type=float, default=0.0, help="default: greedy")
    for name in SAMPLING:
        group.add_argument(name, type=int if name == "--top-k" else float, help="a field of every body")
    group.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="more fields of every body")
    group.add_argument("--seed", type=int, default=0)


def _add_results(group: Any) -> None:
    group.add_argument("--percentile-metrics", default=",".join(METRICS), help="default: all")
    group.add_argument("--metric-percentiles", default="99", metavar="P,P", help="default: 99")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", help="what a request must meet to count as good"
    )
    group.add_argument(
        "--check",
        type=int,
        nargs="?",
        const=sys.maxsize,
        default=0,
        metavar="N",
        help="send N of the prompts (all, without N) alone as well, afterwards: the texts must be the same",
    )
    group.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="kept beside the settings")
    group.add_argument("--disable-tqdm", action="store_true", help="no effect: there is no progress bar")
    group.add_argument("--result-dir", type=Path, default=Path())
    group.add_argument("--result-filename", help="default: online-DATE.json")


def _goal(parser: argparse.ArgumentParser, text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    try:
        return name, float(value)
    except ValueError:
        parser.error(f"--goodput {text}: must be METRIC:MILLISECONDS")
