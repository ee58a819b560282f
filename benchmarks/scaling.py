"""How speed changes with load and with length, on jaxpaged and on its peers, as pictures.

    python -m benchmarks.scaling --peers-env ~/peers --json benchmarks/results/scaling.json
    python -m benchmarks.scaling --draw benchmarks/results/scaling.json       # the pictures again, from a record

Three curves. Throughput against requests that come at once, each with `--short` tokens in and as many out: all output
tokens by the time from the first request to the last token. Time to first token against the length of one request's
prompt, which no prefix cache knows. Time of a step against the tokens before it: what the `--steps` tokens after the
first took, by their number, in the same run. Medians of a point's runs are drawn.

Engines take turns as in `benchmarks.peers`: at each point one run each, while the others are stopped. While `--minutes`
last, each point is measured once, the smallest first, then whichever has had the least time. An engine that took longer
than `--longest` seconds on a point is not asked for larger ones of that curve. A point's first run, in which an engine
may run programs for the first time, counts only where there is no time for another. The pictures are written beside the
record: `scaling-light.png` and `scaling-dark.png`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import peer_group, record
from benchmarks.jobs import Job
from benchmarks.peer_process import Peer


@dataclass
class Point:
    """One place on the axis, and what has been measured there.

    Attributes:
      curve: "requests" or "tokens", what its axis counts.
      runs: an engine's answers by its name.
      spent: seconds of all engines together.
    """

    curve: str
    job: Job
    runs: dict[str, list[dict[str, Any]]]
    spent: float = 0.0

    @property
    def times(self) -> int:
        """How often it was measured."""
        return max(map(len, self.runs.values()), default=0)


def points(args: argparse.Namespace) -> list[Point]:
    """All that is to be measured. One request's first token and its later ones come from the same run."""
    requests = [Job(count, 0, args.short, args.short) for count in args.requests]
    tokens = [Job(1, 0, length, args.steps + 1) for length in args.tokens]
    return [Point("requests", job, {}) for job in requests] + [Point("tokens", job, {}) for job in tokens]


def measure(
    peers: Sequence[Peer], todo: Sequence[Point], args: argparse.Namespace, clock: Callable[[], float] = time.monotonic
) -> None:
    """Runs each point on all engines in turns, again and again until the time is over."""
    deadline = clock() + 60 * args.minutes
    ended: set[tuple[str, str]] = set()  # engines that go no further on a curve
    left = list(todo)
    while left:
        point = min(left, key=lambda point: (point.spent, point.job.num_prompts * point.job.length))
        if clock() + (point.spent / point.times if point.times else 0.0) > deadline:
            left.remove(point)
            continue
        times = point.times
        able = point.runs or [peer.name for peer in peers if (peer.name, point.curve) not in ended]
        turn = [peer for peer in peers if peer.name in able]
        for peer, reply in peer_group.in_turns(turn, point.job.work(times), args.timeout):
            point.runs.setdefault(peer.name, []).append(reply)
            point.spent += reply["seconds"]
            if reply["seconds"] > args.longest:
                ended.add((peer.name, point.curve))
        took = ", ".join(f"{name} {runs[-1]['seconds']:.2f} s" for name, runs in point.runs.items())
        print(f"  {point.job}: {took}", flush=True)
        if point.times == times or point.times > args.repeat:  # nobody is left for it, or it is done
            left.remove(point)


def rows(peers: Sequence[Peer], measured: Sequence[Point]) -> list[dict[str, Any]]:
    """One row an engine and point, of its runs after the first if there are any."""
    return [
        {"curve": point.curve, **peer_group.row(peer, point.job, peer_group.counted(point.runs[peer.name]))}
        for peer in peers
        for point in measured
        if peer.name in point.runs
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the pictures of a record: `scaling-light.png` and `scaling-dark.png` beside `scaling.json`."""
    from benchmarks import scaling_picture

    for theme in scaling_picture.THEMES:
        scaling_picture.draw(result, path.with_name(f"{path.stem}-{theme}.png"), theme)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peer_group.add_options(parser)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--short", type=int, default=16, help="tokens in and out of each of those requests")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 128, 256, 512, 1024, 2048, 4096, 8128])
    parser.add_argument("--steps", type=int, default=32, help="steps that are timed after such a prompt")
    parser.add_argument("--repeat", type=int, default=5, help="most runs of a point after its first; medians are drawn")
    parser.add_argument("--minutes", type=float, default=6.0, help="time for all of it, without starting the engines")
    parser.add_argument("--longest", type=float, default=30.0, metavar="S", help="seconds after which a curve ends")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw this record, and measure nothing")
    args = parser.parse_args(argv)
    if min(*args.requests, *args.tokens, args.short, args.steps, args.repeat) < 1:
        parser.error("requests, lengths, steps and repetitions must be at least 1")
    return args


def main() -> None:
    args = arguments()
    if args.draw:
        draw(json.loads(args.draw.read_text(encoding="utf-8")), args.draw)
        return
    if args.json and find_spec("matplotlib") is None:
        raise SystemExit("the pictures need matplotlib: pip install 'jaxpaged[bench]'")
    # Ended from outside, it must still end the engines, which would stay stopped for ever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    todo = points(args)
    with peer_group.model_files(args) as files:
        jobs = [point.job for point in todo]
        with peer_group.started(peer_group.available(args), args, files, args.dtype, jobs) as peers:
            measure(peers, todo, args)
            measured = rows(peers, todo)
    settings = {key: getattr(args, key) for key in ("model", "dtype", "short", "steps", "repeat", "minutes")}
    result = record.record("scaling", measured, **settings)
    columns = {"engine": "engine", "job": "job", "output_tokens_per_s": "tok/s", "first_token_s": "first token s"}
    print(record.table(measured, columns | {"step_ms": "step ms"}))
    if args.json:
        record.save(result, args.json)
        draw(result, args.json)


if __name__ == "__main__":
    main()
