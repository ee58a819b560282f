"""Loads an OpenAI-compatible server over HTTP and measures what its clients see.

    jaxpaged serve demo --dtype float32 &
    python -m benchmarks.online --num-prompts 200 --request-rate 4 --random-input-len 64 --random-output-len 64 \\
        --ignore-eos --vocab-size 49152 --goodput ttft:500 itl:200 --check 20

Flags and figures are those of `vllm bench serve` where they mean the same. Prompts are random token ids (words, for
/v1/chat/completions), streamed, greedy unless told otherwise. Open loop: `--request-rate`, whatever the server does.
Closed loop: `--max-concurrency` with the default rate. Every answer is checked: that its stream is whole, ends with
[DONE], and has as many tokens as asked for; with `--check`, that its text is the one that the same prompt gives alone.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import record
from benchmarks.http_client import Client, Reply
from benchmarks.latencies import METRICS, Outcome, outcome, summary
from benchmarks.online_options import arguments
from benchmarks.workload import Asked, Lengths, Ramp, arrivals, requests


@dataclass(frozen=True)
class Load:
    """How requests are sent.

    Attributes:
      endpoint: path.
      rate, burstiness, ramp: of arrivals, as in `workload.arrivals`.
      max_concurrency: most requests at a time; those that arrive later wait, and are timed from when they are sent.
      timeout: seconds that an answer may take.
      exactly: every answer must have all tokens that it may have (the end of the sequence is ignored).
    """

    endpoint: str = "/v1/completions"
    rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    timeout: float = 600.0
    exactly: bool = True
    ramp: Ramp | None = None


async def send_all(client: Client, asked: Sequence[Asked], load: Load, seed: int) -> tuple[list[Reply], float]:
    """Sends requests as they arrive. Returns the replies, in the order of the requests, and the seconds it took."""
    places = asyncio.Semaphore(load.max_concurrency or len(asked))

    async def send(request: Asked, at: float) -> Reply:
        await asyncio.sleep(start + at - time.monotonic())
        async with places:
            return await client.post(load.endpoint, request.body, timeout=load.timeout)

    times = arrivals(len(asked), load.ramp or load.rate, load.burstiness, seed)
    gc.collect()
    gc.freeze()
    start = time.monotonic()
    replies = await asyncio.gather(*map(send, asked, times))
    seconds = time.monotonic() - start
    gc.unfreeze()
    return list(replies), seconds


async def measure(
    client: Client, asked: Sequence[Asked], load: Load, *, seed: int = 0, check: int = 0
) -> tuple[list[Outcome], float]:
    """Sends requests, looks at the answers, and repeats the first `check` requests alone to compare the texts.

    Returns the outcomes and the seconds that the requests took.
    """
    replies, seconds = await send_all(client, asked, load, seed)
    outcomes = [outcome(r, a.output_len, exactly=load.exactly) for r, a in zip(replies, asked, strict=True)]
    for request, first in list(zip(asked, outcomes, strict=True))[:check]:
        reply = await client.post(load.endpoint, request.body, timeout=load.timeout)
        alone = outcome(reply, request.output_len, exactly=load.exactly)
        if not first.fault and (alone.fault or alone.text != first.text):
            first.fault = (
                f"alone: {alone.fault}" if alone.fault else f"{first.text!r:.200}, but alone {alone.text!r:.200}"
            )
    return outcomes, seconds


async def model_name(client: Client) -> str:
    """The first model that the server lists."""
    reply = await client.get("/v1/models")
    if reply.error or reply.status != 200:
        raise SystemExit(f"GET /v1/models: {reply.error or reply.status}")
    return json.loads(reply.body)["data"][0]["id"]


def report(figures: dict[str, Any]) -> str:
    """Figures as lines of text."""
    plain = {key: value for key, value in figures.items() if not key.endswith("_ms")}
    lines = [f"{key.replace('_', ' '):24s} {value:.2f}".rstrip("0").rstrip(".") for key, value in plain.items()]
    rows = []
    for metric, name in METRICS.items():
        suffix = f"_{metric}_ms"
        row = {key.removesuffix(suffix): value for key, value in figures.items() if key.endswith(suffix)}
        if row:
            rows.append({"ms": f"{metric} ({name})", **row})
    columns = {key: key for row in rows[:1] for key in row}
    return "\n".join([*lines, "", record.table(rows, columns)] if rows else lines)


async def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[Outcome]]:
    """One run: its figures and outcomes."""
    headers = dict(pair.split("=", 1) for pair in args.header)
    if key := os.environ.get("OPENAI_API_KEY"):
        headers = {"Authorization": f"Bearer {key}", **headers}
    client = Client(args.base_url or f"http://{args.host}:{args.port}", headers)
    args.model = args.served_model_name or args.model or await model_name(client)
    fields = {"model": args.model, "ignore_eos": args.ignore_eos, **args.sampling, **args.extra_body}
    inputs, outputs = (
        Lengths(mean, args.random_range_ratio, args.length_exponent)
        for mean in (args.random_input_len, args.random_output_len)
    )
    make = {
        "chat": "chat" in args.endpoint,
        "vocab_size": args.vocab_size,
        "fields": fields,
        "prefix_len": args.random_prefix_len,
    }
    asked = requests(args.num_prompts, inputs, outputs, seed=args.seed, **make)
    load = Load(
        args.endpoint,
        args.request_rate,
        args.burstiness,
        args.max_concurrency,
        args.timeout,
        args.ignore_eos,
        args.ramp,
    )
    if args.num_warmups:
        warm_ups = requests(args.num_warmups, inputs, outputs, seed=args.seed + 1, **make)
        await send_all(client, warm_ups, load, args.seed)
    outcomes, seconds = await measure(client, asked, load, seed=args.seed, check=args.check)
    client.close()
    figures = summary(outcomes, seconds, metrics=args.metrics, percentiles=args.percentiles, goals=args.goals)
    return figures, outcomes


def main() -> None:
    args = arguments()
    figures, outcomes = uvloop.run(run(args))
    print(report(figures))
    faults = [item.fault for item in outcomes if item.fault]
    for fault in faults[:10]:
        print(f"failed: {fault}")
    if args.save_result:
        settings = {key: value for key, value in vars(args).items() if key not in _NOT_SETTINGS}
        settings["metadata"] = dict(pair.partition("=")[::2] for pair in args.metadata)
        settings["header"] = [pair.partition("=")[0] for pair in args.header]  # the values may be secrets
        result = record.record("online", [figures], **{key: _plain(value) for key, value in settings.items()})
        name = args.result_filename or f"online-{time.strftime('%Y%m%d-%H%M%S')}.json"
        record.save(result, args.result_dir / name)
    sys.exit(1 if faults else 0)


_NOT_SETTINGS = ("metrics", "percentiles", "goals", "sampling", "ramp", "disable_tqdm")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return None if value == float("inf") else value  # JSON has no infinity


if __name__ == "__main__":
    main()
