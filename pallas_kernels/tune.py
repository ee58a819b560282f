"""Finds good tile sizes on the device that it runs on, and keeps them: `python -m pallas_kernels.tune`.

Starts from the heuristic and tries what differs from the best so far in one or two fields, until nothing near is
better. Candidates of a round are compiled side by side and timed in turn; one that does not compile, or whose result
is not the reference's, is left out with a message. Shapes that look up the same entry are tuned together.
"""

import argparse
import concurrent.futures
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import timing, tuning
from pallas_kernels.ragged_paged_attention.cases import Case
from pallas_kernels.timing import Attention, attention

OP = "ragged_paged_attention"
TOLERANCE = 2e-2  # of outputs in bfloat16
GAIN = 0.99  # what is better takes at most this share of the time
# Field -> (lowest, highest) that are tried. Queries per program are given by the group in a decode.
FIELDS: dict[str, dict[str, tuple[int, int]]] = {
    "decode": {"keys": (16, 256), "splits": (1, 64), "num_warps": (1, 8), "num_stages": (1, 7)},
    "prefill": {"rows": (16, 256), "keys": (16, 128), "num_warps": (2, 16), "num_stages": (1, 5)},
    "tpu_decode": {"keys": (128, 512), "depth": (2, 8)},
    "tpu_prefill": {"queries": (8, 256), "keys": (128, 512), "depth": (2, 4)},
}
Tiles = dict[str, int]


@dataclass
class Job:
    """Shapes that share an entry.

    Attributes:
      kernel: a key of `FIELDS`.
      key: of the entry.
      start: the heuristic's value.
      shapes: by name.
    """

    kernel: str
    key: dict[str, int | str]
    start: Tiles
    shapes: dict[str, Attention]


@dataclass(frozen=True)
class Result:
    """A candidate and its seconds per call, by shape."""

    tiles: Tiles
    seconds: dict[str, float]

    @property
    def score(self) -> float:
        """Geometric mean of the times."""
        return math.exp(sum(map(math.log, self.seconds.values())) / len(self.seconds))


def jobs(cases: dict[str, Case], *, interpret: bool, implementation: str = "gpu") -> list[Job]:
    """What there is to tune for these shapes."""
    found: dict[str, Job] = {}
    for name, case in cases.items():
        kernel = "decode" if all(q_len <= 1 for q_len, _ in case.rows) else "prefill"
        kernel = f"tpu_{kernel}" if implementation == "tpu" else kernel
        shape = attention(case)
        jax.clear_caches()
        with tuning.trying(OP, **{kernel: None}) as trial:
            shape.lower(implementation=implementation, interpret=interpret)
        if kernel not in trial.asked or kernel not in trial.defaults:
            raise RuntimeError(f"{OP} does not look up the tiles of {kernel}, or tells no default")
        key = trial.asked[kernel]
        job = found.setdefault(f"{kernel} {key}", Job(kernel, key, trial.defaults[kernel], {}))
        job.shapes[name] = shape
    return list(found.values())


def near(kernel: str, tiles: Tiles) -> list[Tiles]:
    """What differs from `tiles` in one field or two, by a factor of two (a step or two for the stages)."""
    moves = []
    for name, (low, high) in FIELDS[kernel].items():
        now = tiles[name]
        values = (now + 1, now - 1, now + 2, now - 2) if name in ("num_stages", "depth") else (now * 2, now // 2)
        moves += [(name, value) for value in values if low <= value <= high]
    pairs = [pair for pair in itertools.combinations(moves, 2) if pair[0][0] != pair[1][0]]
    return [{**tiles, **dict(change)} for change in [*((move,) for move in moves), *pairs]]


class Tuner:
    """Tunes one job after the other.

    Attributes:
      interpret: run the kernels by interpretation.
      implementation: "gpu" or "tpu".
      say: gets a line of text now and then.
    """

    def __init__(self, *, interpret: bool = False, implementation: str = "gpu", say: Callable[[str], None] = print):
        self.interpret, self.implementation, self.say = interpret, implementation, say

    def tune(self, job: Job, deadline: float, *, rounds: int = 5, most: int = 16) -> list[Result]:
        """The candidates that work, the best first. The heuristic's is among them, if it works.

        Args:
          deadline: on `time.monotonic`; no more candidates are taken up than there seems to be time for.
          rounds: samples of each candidate.
          most: candidates that are compared at a time.
        """
        expected = {name: shape.reference() for name, shape in job.shapes.items()}
        jax.block_until_ready(expected)
        start = time.monotonic()
        tried: list[Tiles] = [job.start]
        results = self._compare(job, tried, expected, rounds)
        while True:
            each = (time.monotonic() - start) / len(tried)
            fits = min(most, int((deadline - time.monotonic()) / each))
            best = min(results, key=lambda result: result.score, default=None)
            candidates = [t for t in near(job.kernel, best.tiles if best else job.start) if t not in tried][:fits]
            if fits < 1 or not candidates:
                break
            tried += candidates
            # The best so far runs again: times of one comparison and of another may differ.
            new = self._compare(job, [*([best.tiles] if best else []), *candidates], expected, rounds)
            again = next((result for result in new if best and result.tiles == best.tiles), None)
            results = [result for result in results if not again or result.tiles != again.tiles] + new
            if again and len(candidates) >= most and min(result.score for result in new) > GAIN * again.score:
                break
        return sorted(results, key=lambda result: result.score)

    def _compare(self, job: Job, candidates: list[Tiles], expected: dict[str, jax.Array], rounds: int) -> list[Result]:
        programs: dict[str, timing.Program] = {}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            pending = {}
            for i, tiles in enumerate(candidates):
                for name in job.shapes:
                    make = self._lower(job, tiles, name)
                    pending[i, name] = pool.submit(lambda make=make: make().compile())
            for (i, name), future in pending.items():
                problem = None
                try:
                    program = job.shapes[name].program(future.result())
                    problem = _wrong(program.run()[0], expected[name])
                    programs[f"{i} {name}"] = program
                except Exception as error:  # whatever the compiler or the device thinks of these sizes
                    problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
                if problem:
                    programs.pop(f"{i} {name}", None)
                    self.say(f"  left out {_text(job.kernel, candidates[i])} on {name}: {problem}")
        complete = [i for i in range(len(candidates)) if all(f"{i} {name}" in programs for name in job.shapes)]
        kept = {f"{i} {name}": programs[f"{i} {name}"] for i in complete for name in job.shapes}
        seconds = timing.measure(kept, rounds=rounds, sample_seconds=0.0 if self.interpret else 0.005)
        return [Result(candidates[i], {name: seconds[f"{i} {name}"] for name in job.shapes}) for i in complete]

    def _lower(self, job: Job, tiles: Tiles, name: str) -> Callable[[], jax.stages.Lowered]:
        """The traced program; tracing errors are raised when it is called for."""
        jax.clear_caches()  # programs inside the operation's own jit were traced with other tiles
        try:
            with tuning.trying(OP, **{job.kernel: tiles}):
                lowered = job.shapes[name].lower(implementation=self.implementation, interpret=self.interpret)
        except Exception as error:
            failed = error

            def fail() -> jax.stages.Lowered:
                raise failed

            return fail
        return lambda: lowered


def _wrong(got: jax.Array, expected: jax.Array) -> str | None:
    """What is wrong with a result, if anything."""
    difference = jnp.max(jnp.abs(got.astype(jnp.float32) - expected.astype(jnp.float32)))
    return None if difference <= TOLERANCE else f"wrong by {difference:.2g}"


def _text(kernel: str, tiles: Tiles) -> str:
    return " ".join(f"{name}={tiles[name]}" for name in FIELDS[kernel])


def table(job: Job, results: list[Result], count: int = 8) -> Iterable[str]:
    """Lines: the best candidates and the heuristic's, with their share of the best."""
    yield f"{job.kernel} {job.key}: {len(results)} candidates"
    for i, result in enumerate(results):
        start = result.tiles == job.start
        if i < count or start:
            times = ", ".join(f"{name}: {1e6 * seconds:.1f} us" for name, seconds in result.seconds.items())
            share = f"{100 * results[0].score / result.score:5.1f} %"
            yield f"  {share}  {_text(job.kernel, result.tiles):50s} {times}{' (heuristic)' if start else ''}"


def tune(
    cases: dict[str, Case],
    *,
    budget: float,
    folder: Path | None,
    interpret: bool = False,
    implementation: str = "gpu",
    say: Callable[[str], None] = print,
    rounds: int = 5,
    most: int = 16,
) -> list[tuple[Job, list[Result]]]:
    """Tunes for these shapes, writes an entry as soon as it is known, and tells the results.

    Args:
      budget: seconds; each entry gets an equal share of what is left.
      folder: for the entries; None: they are not written.
      rounds, most: see `Tuner.tune`.
    """
    end = time.monotonic() + budget
    found = []
    todo = jobs(cases, interpret=interpret, implementation=implementation)
    for i, job in enumerate(todo):
        now = time.monotonic()
        results = Tuner(interpret=interpret, implementation=implementation, say=say).tune(
            job, now + (end - now) / (len(todo) - i), rounds=rounds, most=most
        )
        for line in table(job, results):
            say(line)
        if results and folder:
            best = results[0]
            measured: dict[str, Any] = {"us": {name: round(1e6 * seconds, 2) for name, seconds in best.seconds.items()}}
            start = next((result for result in results if result.tiles == job.start), None)
            if start:
                measured["heuristic_share"] = round(best.score / start.score, 3)
            measured["jax"] = jax.__version__
            path = tuning.record(OP, job.kernel, job.key, best.tiles, measured=measured, folder=folder)
            say(f"  wrote {path}")
        found.append((job, results))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=(OP,), default=OP)
    parser.add_argument("--shapes", default="main", help='"main": all; or a part of the names of some, as "decode"')
    parser.add_argument("--budget", type=float, default=120.0, help="seconds; compiling may take some more")
    parser.add_argument("--tiny", action="store_true", help="small shapes, interpreted where there is no GPU or TPU")
    parser.add_argument("--implementation", choices=("gpu", "tpu"), help="with --tiny: which one to interpret")
    parser.add_argument("--out", type=Path, help="folder for the entries (default: the package's; with --tiny: none)")
    args = parser.parse_args()
    platform = jax.default_backend()
    interpret = platform not in ("gpu", "tpu")
    if interpret and not args.tiny:
        parser.error(f"{jax.devices()[0].device_kind} is no GPU and no TPU: only --tiny runs here")
    implementation = (args.implementation or "gpu") if interpret else platform
    shapes = timing.TINY_SHAPES if args.tiny else timing.SHAPES
    cases = {name: case for name, case in shapes.items() if args.shapes == "main" or args.shapes in name}
    if not cases:
        parser.error(f"--shapes {args.shapes}: no such shape; there are {', '.join(shapes)}")
    rounds, most = (1, 2) if interpret else (5, 16)
    folder = args.out or (None if args.tiny else tuning.FOLDER)
    tune(
        cases,
        budget=args.budget,
        folder=folder,
        interpret=interpret,
        implementation=implementation,
        rounds=rounds,
        most=most,
    )


if __name__ == "__main__":
    main()
