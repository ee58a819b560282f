"""Tunes the attention kernels here, keeps the entries, and times attention again."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from benchmarks.device.kernel_times import THREADS, attention_items, shapes
from benchmarks.device.worker import Context, Report
from pallas_kernels import tune, tuning


def run(report: Report, context: Context) -> None:
    report.run("tune", partial(tuned, context, 1.0 if context.tiny else max(1.0, 0.75 * report.seconds_left)))
    jax.clear_caches()  # of programs that were traced with the old entries
    report.run_prepared(attention_items(context), threads=2 if context.tiny else THREADS)


def tuned(context: Context, budget: float) -> Mapping[str, Any]:
    """Runs the tuner; entries go to the package, and a copy to where files are kept."""
    lines: list[str] = []
    interpret = jax.default_backend() == "cpu"
    folder = context.scratch / "tuned" if context.tiny else tuning.FOLDER
    rounds, most = (1, 2) if context.tiny else (5, 16)

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    try:
        found = tune.tune(
            shapes(context), budget=budget, folder=folder, interpret=interpret, say=say, rounds=rounds, most=most
        )
    finally:
        if context.keep and folder.exists():
            shutil.copytree(folder, context.keep / "tuned", dirs_exist_ok=True)
    return {
        "entries": [
            {"kernel": job.kernel, "key": job.key, "best": results[0].tiles, "start": job.start, "tried": len(results)}
            for job, results in found
            if results
        ],
        "lines": lines,
    }
