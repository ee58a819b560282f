"""The same work on jaxpaged and on its peers, in one run on one machine.

    python -m benchmarks.peers --make-env ~/peers            # once: vLLM for CPU, transformers, torch (several GB)
    python -m benchmarks.peers --peers-env ~/peers --json benchmarks/results/peers.json
    git worktree add /tmp/before COMMIT                      # to see what has changed since:
    python -m benchmarks.peers --peers-env ~/peers --baseline /tmp/before

Every engine is a process of its own with its model loaded. They take turns, repetition by repetition, and whoever is
not measured is stopped (SIGSTOP), so that a drift of the machine meets them all and nobody's idle threads cost another
anything. Work: jobs, each some requests of random ids that come at once, the same for all, greedy, the end of the
sequence ignored. `32x128+128` is 32 requests of 128 tokens in and 128 out; in `32x1024:64+128` the prompts share their
first 1,024 tokens, and 64 more are their own. Prefix caching is on where an engine has it; nothing else repeats.
An engine's first run of a job, in which it may run programs for the first time, counts only where it took more than
`--once` seconds, and so is the only one. Medians are shown. Engines that are not installed are left out and named.
"""

from __future__ import annotations

import argparse
import fnmatch
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import peer_group, record
from benchmarks.jobs import Job
from benchmarks.peer_env import make_env
from benchmarks.peer_process import Peer

JOBS = ("32x128+128", "8x128+128", "1x128+128", "8x2048+64", "32x1024:64+128")
LEFT_OUT = ("transformers/*/32x1024:64+128",)  # without a prefix cache it computes 34,816 tokens in one piece
RATIOS = (("jaxpaged", "before"), ("jaxpaged", "vllm"))


def compare(peers: list[Peer], args: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """Measures every job on every engine, turn by turn; one row an engine and job."""
    rows = []
    for job in args.jobs:
        runs: dict[str, list[dict[str, Any]]] = {
            peer.name: [] for peer in peers if not left_out(args, peer.name, dtype, job)
        }
        for repetition in range(1 + args.repeat):
            turn = [peer for peer in peers if peer.name in runs and quick(runs[peer.name], args.once)]
            for peer, reply in peer_group.in_turns(turn, job.work(repetition), args.timeout):
                runs[peer.name].append(reply)
                speed = job.num_prompts * job.output_len / reply["seconds"]
                print(f"  {dtype} {job}, {peer.name}: {speed:.1f} tok/s, {reply['seconds']:.1f} s", flush=True)
        outputs = {name: made[0]["token_ids"] for name, made in runs.items() if made}
        rows += [
            {
                "dtype": dtype,
                **peer_group.row(peer, job, peer_group.counted(runs[peer.name])),
                "same_tokens": agreement(outputs[peer.name], next(iter(outputs.values()))),
            }
            for peer in peers
            if peer.name in outputs
        ]
    return rows


def left_out(args: argparse.Namespace, engine: str, dtype: str, job: Job) -> bool:
    """Whether somebody said that this is not to be measured."""
    return any(fnmatch.fnmatchcase(f"{engine}/{dtype}/{job}", pattern) for pattern in args.leave_out)


def quick(runs: Iterable[Mapping[str, Any]], most: float) -> bool:
    """Whether none of an engine's runs of a job took so long that one is enough."""
    return all(run["seconds"] <= most for run in runs)


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of positions, over all outputs, that come before the first difference.

    Near 1 in float32 if both run the same model.
    """
    total = same = 0
    for a, b in zip(ours, theirs, strict=True):
        total += len(b)
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / total if total else 0.0


def wide_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One dtype's rows, output tokens/s: a line an engine and a column a job; then ours by theirs."""
    columns = {"engine": "output tok/s"} | {item["job"]: item["title"] for item in rows}
    lines: dict[str, dict[str, Any]] = {}
    for item in rows:
        missing: dict[str, Any] = dict.fromkeys(columns, "-")
        line = lines.setdefault(item["engine"], missing | {"engine": peer_group.label(item)})
        line[item["job"]] = item["output_tokens_per_s"]
        line["load"] = item["load_to_first_token_s"]
    for a, b in RATIOS:
        if a in lines and b in lines:
            ratios = {key: _ratio(lines[a][key], lines[b][key]) for key in columns if key != "engine"}
            lines[f"{a} / {b}"] = {"engine": f"{a} / {b}", **ratios}
    return record.table(list(lines.values()), columns | {"load": "start to first token, s"})


def _ratio(ours: float | str, theirs: float | str) -> str:
    return "-" if isinstance(ours, str) or isinstance(theirs, str) else f"**{ours / theirs:.2f} x**"


def tables(result: Mapping[str, Any]) -> str:
    """A record as Markdown: what was measured where, and a table a dtype."""
    machine, settings = result["machine"], result["settings"]
    where = f"{machine['cores']} cores of an {machine['cpu']} ({', '.join(machine['flags'])})"
    parts = [
        f"Model {settings['model']}, random tokens in, greedy, all in one run on {where}, "
        f"medians of {settings['repeat']} after a first, uncounted one; runs of over {settings['once']:g} s were not "
        "repeated (`python -m benchmarks.peers`)."
    ]
    for dtype in dict.fromkeys(item["dtype"] for item in result["results"]):
        parts += [f"{dtype}:", wide_table([item for item in result["results"] if item["dtype"] == dtype])]
    return "\n\n".join(parts)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peer_group.add_options(parser)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--jobs", nargs="+", type=Job.parse, default=[Job.parse(text) for text in JOBS])
    parser.add_argument("--repeat", type=int, default=3, help="runs of each after a first; medians are shown")
    parser.add_argument(
        "--once", type=float, default=60.0, metavar="S", help="a run of more seconds than this is not repeated"
    )
    parser.add_argument(
        "--leave-out",
        nargs="*",
        default=list(LEFT_OUT),
        metavar="ENGINE/DTYPE/JOB",
        help=f"what not to measure, * for any (default: {' '.join(LEFT_OUT)})",
    )
    parser.add_argument("--make-env", type=Path, metavar="DIR", help="make an environment for --peers-env, and stop")
    parser.add_argument("--llama-cpp", action="store_true", help="with --make-env: build llama.cpp too (minutes)")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of every dtype."""
    rows: list[dict[str, Any]] = []
    names = peer_group.available(args)
    with peer_group.model_files(args) as files:
        for dtype in args.dtypes:
            asked = [name for name in names if not all(left_out(args, name, dtype, job) for job in args.jobs)]
            with peer_group.started(asked, args, files, dtype, args.jobs) as peers:
                rows += compare(peers, args, dtype)
    return rows


def main() -> None:
    args = arguments()
    # Ended from outside, it must still end the engines, which would stay stopped for ever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if args.make_env:
        make_env(args.make_env, llama_cpp=args.llama_cpp)
        return
    result = record.record(
        "peers",
        measure(args),
        model=args.model,
        jobs=[str(job) for job in args.jobs],
        repeat=args.repeat,
        once=args.once,
        left_out=args.leave_out,
        baseline=record.commit(args.baseline) if args.baseline else None,
    )
    print("\n" + tables(result))
    if args.json:
        record.save(result, args.json)


if __name__ == "__main__":
    main()
