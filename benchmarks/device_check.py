"""Checks and times everything on the GPU of this machine, in minutes: `bash benchmarks/device_check.sh`.

Stages run one after the other, each in a process of its own with a limit of time, the most important first. What one
item breaks, a crash of the driver included, costs that item alone; results are on file after each stage. With `--tiny`
the same stages run on a CPU, small and interpreted, to try the check itself.

It needs jax, flax, transformers and numpy, and uses torch where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.device import summary, worker

PACKAGE = "benchmarks.device."
ATTEMPTS = 4
GRACE = 8.0  # seconds for a worker to end after its last item


@dataclass(frozen=True)
class Stage:
    """A module of `benchmarks.device` whose `run` is started.

    Attributes:
      share: of the time that is left, beside the shares of the stages after it.
      patience: seconds that one item may take; what takes longer is taken to hang.
      memory: share of the GPU's memory that JAX takes at once.
    """

    name: str
    module: str
    share: float
    patience: float
    memory: float = 0.75


BUDGET = 330.0
STAGES = (
    Stage("facts", "ceilings", 30, patience=20),
    Stage("correctness", "correctness", 60, patience=25),
    Stage("kernels", "kernel_times", 40, patience=30),
    Stage("tuned", "tuned_times", 60, patience=600),
    Stage("model", "model", 110, patience=120, memory=0.9),
    Stage("torch", "torch_decode", 50, patience=90),
)
NEEDED = ("jax", "numpy", "flax", "transformers")


class Check:
    """The run: what is known so far, and where it is written.

    Attributes:
      rows: of all stages; each has `stage` and `name`.
      stages: name -> seconds, and how it ended.
    """

    def __init__(self, args: argparse.Namespace, scratch: Path):
        self._args, self._scratch = args, scratch
        self._end = time.monotonic() + args.budget
        out = os.environ.get("OUT")
        self._keep = Path(out) if out else None
        self.rows: list[dict[str, Any]] = []
        self.stages: dict[str, dict[str, Any]] = {}

    def run(self, stage: Stage, *, later: float = 0.0) -> None:
        """Runs a stage, again after a crash, without the item that crashed.

        Args:
          later: shares of the stages after it.
        """
        start = time.monotonic()
        end = start + (self._end - start) * stage.share / (stage.share + later)
        path = self._scratch / f"{stage.name}.jsonl"
        crashed: list[dict[str, Any]] = []
        status = "no time left"
        for _ in range(ATTEMPTS):
            if end - time.monotonic() < 2:
                break
            code = self._work(stage, path, [row["name"] for row in crashed], end)
            _, begun = worker.read(path)
            if code == 0:
                status = "done"
                break
            status = "took too long" if code is None else f"ended with {code}"
            problem = f"{status}; {self._last_words(stage)}"
            if begun is not None:
                crashed.append({"name": begun, "error": problem})
            elif code is None:
                break
            elif code != worker.DEVICE_BROKEN:
                crashed.append({"name": stage.name, "error": problem})
                break
        rows, _ = worker.read(path)
        self.rows += [{"stage": stage.name, **row} for row in rows + crashed]
        self.stages[stage.name] = {"seconds": round(time.monotonic() - start, 1), "status": status}
        self.write()

    def write(self) -> None:
        """Puts the record on file."""
        path = self._path()
        if path:
            settings = {
                "budget": self._args.budget,
                "tiny": self._args.tiny,
                "implementation": self._args.implementation,
            }
            result = record.record("device_check", self.rows, **settings) | {"stages": self.stages}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    def _work(self, stage: Stage, path: Path, crashed: list[str], end: float) -> int | None:
        """Starts a worker and waits for it. Returns its exit status; None: it took too long and was killed."""
        known = self._scratch / "known.json"
        known.write_text(json.dumps(self.rows), encoding="utf-8")
        done, _ = worker.read(path)
        job = {
            "module": PACKAGE + stage.module,
            "rows": str(path),
            "skip": [row["name"] for row in done] + crashed,
            "seconds": end - time.monotonic(),
            "tiny": self._args.tiny,
            "implementation": self._args.implementation,
            "known": str(known),
            "scratch": str(self._scratch),
            "keep": str(self._keep) if self._keep else None,
        }
        environment = {
            **os.environ,
            "XLA_PYTHON_CLIENT_MEM_FRACTION": str(stage.memory),
            "JAX_COMPILATION_CACHE_DIR": str(self._scratch / "xla"),
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1"),
        }
        with self._log(stage).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.device.worker", json.dumps(job)],
                cwd=record.ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a group of its own, which can be ended as one
            )
            try:
                while time.monotonic() < end + GRACE:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        return process.wait(0.2)
                    if worker.waits_for(path) > stage.patience * (4 if self._args.tiny else 1):  # a CPU may be busy
                        break
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _log(self, stage: Stage) -> Path:
        return self._scratch / f"{stage.name}.log"

    def _last_words(self, stage: Stage) -> str:
        lines = self._log(stage).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"its last words: {lines[-1][:200] if lines else 'none'}"

    def _path(self) -> Path | None:
        if self._keep:
            return self._keep / "device_check.json"
        if self._args.json is None:
            return None
        return Path(self._args.json) if self._args.json else record.RESULTS / f"{self._slug()}.json"

    def _slug(self) -> str:
        """A file's name from the device's."""
        kind = next((row["kind"] for row in self.rows if row["name"] == "device" and "kind" in row), "unknown")
        return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")

    def keep_logs(self) -> None:
        """Puts what the workers printed into one file, if files are kept."""
        if self._keep:
            texts = [
                f"=== {log.stem}\n{log.read_text(errors='replace')[-200_000:]}" for log in self._scratch.glob("*.log")
            ]
            (self._keep / "device_check.log").write_text("\n".join(texts), encoding="utf-8")


def missing() -> list[str]:
    """What is needed and cannot be imported here."""
    code = "import importlib.util, sys; print(*[n for n in sys.argv[1:] if importlib.util.find_spec(n) is None])"
    return subprocess.run([sys.executable, "-c", code, *NEEDED], capture_output=True, text=True).stdout.split()


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all stages together")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on any device")
    parser.add_argument("--implementation", default="gpu", help="of the kernels")
    parser.add_argument("--stages", nargs="+", choices=[stage.name for stage in STAGES], help="only these")
    where = "file for the results (default: benchmarks/results/<device>.json); with $OUT set they go there"
    parser.add_argument("--json", nargs="?", const="", help=where)
    return parser.parse_args(argv)


def default_platform() -> str:
    """What JAX runs on by default; asked in another process, for the first to ask takes the GPU's memory."""
    code = "import jax; print(jax.default_backend())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return asked.stdout.strip() or f"nothing: {asked.stderr[-300:]}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the stages and prints a table; exits with 1 if anything was wrong or broke."""
    args = arguments(argv)
    if lacking := missing():
        raise SystemExit(f"{sys.executable} lacks {', '.join(lacking)}")
    if not args.tiny and default_platform() == "cpu":
        raise SystemExit(
            "JAX sees no GPU here, only a CPU. On a machine with one: pip install -e '.[cuda12]' (or cuda13). "
            "--tiny tries the check itself on a CPU."
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the worker is ended, too
    with tempfile.TemporaryDirectory() as scratch:
        check = Check(args, Path(scratch))
        try:
            stages = [stage for stage in STAGES if not args.stages or stage.name in args.stages]
            for i, stage in enumerate(stages):
                print(f"{stage.name} ...", file=sys.stderr, flush=True)
                check.run(stage, later=sum(other.share for other in stages[i + 1 :]))
        finally:
            check.write()
            check.keep_logs()
            print("\n".join(summary.lines(check.rows, check.stages)), flush=True)
    if any("error" in row or row.get("ok") is False for row in check.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
