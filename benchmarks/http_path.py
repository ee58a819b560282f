"""What the way from the engine to an HTTP client costs: streaming from an engine without a model.

    python -m benchmarks.http_path --json benchmarks/results/http_path.json

The server is the real one, API process and core process, with sockets and messages between; only the engine is
scripted: every step gives each stream one token, at a fixed pace. The client is that of `benchmarks.online`, in a
process of its own, on the same cores.

A token is the time at which the engine handed it out (the end of its step), so a client knows how old each is: "added
latency" runs from there until the bytes with its text have been read from the client's socket. "front", "core" and
"client" are the CPU time of the processes, a token. The parts are timed alone, in a loop.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import http_parts, online, record
from benchmarks.http_client import Client, Reply
from benchmarks.latencies import chunk_text, outcome, percentile
from benchmarks.scripted_engine import STAMP_CHARS, VOCAB_SIZE, age, write_tokenizer
from benchmarks.server_process import ServerProcess, free_port
from benchmarks.workload import Lengths, requests

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
COLUMNS = {
    "endpoint": "endpoint",
    "streams": "streams",
    "offered": "offered tok/s",
    "tokens_per_s": "tok/s",
    "chunks_per_s": "chunks/s",
    "latency_ms": "added latency, ms",
    "latency_p99_ms": "99 %",
    "front_us": "front us/token",
    "core_us": "core",
    "client_us": "client",
}


def measure(endpoint: str, streams: int, rate: float, args: argparse.Namespace) -> dict[str, Any]:
    """One load on one server of its own: `rate` tokens a second, over all streams."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.scripted_server", folder, str(port), str(streams / rate)]
        command += ["--in-process"] if args.in_process else []
        environment = {"PYTHONPATH": str(record.ROOT)}
        log = args.log or Path(folder) / "log"
        server = ServerProcess("front", command, port, log=log, environment=environment, timeout=60)
        try:
            runs = [uvloop.run(_load(server, ENDPOINTS[endpoint], streams, rate, args)) for _ in range(args.repeat)]
        finally:
            server.close()
    row = {"endpoint": endpoint, "streams": streams, "offered": rate}
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return row | medians | {"tokens_per_s_all": [run["tokens_per_s"] for run in runs]}


async def _load(
    server: ServerProcess, endpoint: str, streams: int, rate: float, args: argparse.Namespace
) -> dict[str, Any]:
    """All streams at once, as many tokens each as come in `args.seconds`."""
    client = Client(server.url)
    output_len = max(16, min(round(args.seconds * rate / streams), 2000))
    fields = {"temperature": 0.0, "ignore_eos": True}
    asked = requests(
        streams,
        Lengths(32),
        Lengths(output_len),
        chat="chat" in endpoint,
        vocab_size=VOCAB_SIZE,
        seed=0,
        fields=fields,
    )
    load = online.Load(endpoint, timeout=60 + 10 * args.seconds)
    await online.send_all(client, asked[:20], load, 0)  # the first ones find nothing compiled, nothing connected
    before, own = server.cpu_seconds(), _own_cpu()
    replies, seconds = await online.send_all(client, asked, load, 0)
    spent, own = server.cpu_seconds(), _own_cpu() - own
    client.close()
    tokens = len(asked) * output_len
    if faults := [o.fault for o in (outcome(r, output_len, exactly=True) for r in replies) if o.fault]:
        raise RuntimeError(f"{len(faults)} of {len(replies)} streams failed; the first: {faults[0]}")
    ages = [token_age for reply in replies for token_age in added_latencies(reply)]
    children = sum(spent[name] - before.get(name, 0.0) for name in spent if name != "front")
    return {
        "tokens_per_s": tokens / seconds,
        "chunks_per_s": sum(1 for reply in replies for _ in _texts(reply)) / seconds,
        "latency_ms": 1e3 * statistics.median(ages),
        "latency_p99_ms": 1e3 * percentile(ages, 99),
        "front_us": 1e6 * (spent["front"] - before["front"]) / tokens,
        "core_us": 1e6 * children / tokens,
        "client_us": 1e6 * own / tokens,
    }


def _texts(reply: Reply) -> Iterator[tuple[float, str]]:
    """When each piece of text came, and what it says."""
    for now, data in reply.events():
        if data != b"[DONE]":
            text = chunk_text(data)
            if text:
                yield now, text


def added_latencies(reply: Reply) -> Iterator[float]:
    """How old each token of an answer was when it came, in seconds."""
    for now, text in _texts(reply):
        for i in range(0, len(text), STAMP_CHARS):
            yield age(text[i : i + STAMP_CHARS], now)


def _own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--loads",
        nargs="+",
        default=["1:100", "50:1000", "50:8000", "200:4000", "200:12000", "200:16000"],
        metavar="STREAMS:RATE",
        help="streams, and tokens a second over all of them",
    )
    parser.add_argument("--endpoints", nargs="+", choices=ENDPOINTS, default=["completions"])
    parser.add_argument("--seconds", type=float, default=5.0, help="how long a run takes, if the server keeps up")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; medians are shown")
    parser.add_argument("--in-process", action="store_true", help="the engine in the API process")
    parser.add_argument("--no-parts", action="store_true", help="do not time the parts alone")
    parser.add_argument("--log", type=Path, help="keep the server's own output in this file")
    parser.add_argument("--json", type=Path, help="write the record here")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    loads = [(int(streams), float(rate)) for streams, _, rate in (load.partition(":") for load in args.loads)]
    rows = [measure(endpoint, *load, args) for endpoint in args.endpoints for load in loads]
    print(record.table(rows, COLUMNS))
    parts = [] if args.no_parts else http_parts.measure()
    if parts:
        print("\n" + record.table(parts, http_parts.COLUMNS))
    if args.json:
        settings = {"seconds": args.seconds, "repeat": args.repeat, "in_process": args.in_process}
        record.save(record.record("http_path", rows, **settings, parts=parts), args.json)


if __name__ == "__main__":
    main()
