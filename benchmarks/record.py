"""What a benchmark writes down: results with the commit, the machine and the versions that gave them."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Features that decide which matrix kernels run.
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def record(benchmark: str, results: Sequence[Mapping[str, Any]], **settings: Any) -> dict[str, Any]:
    """A JSON-able record of one run.

    Args:
      benchmark: its name.
      results: rows; numbers carry their unit in the key (`output_tokens_per_s`).
      settings: what was asked for.
    """
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": COMMIT,
        "machine": machine(),
        "versions": versions(("jaxpaged", "jax", "jaxlib", "flax", "numpy")),
        "settings": settings,
        "results": list(results),
    }


def commit(root: Path = ROOT) -> str:
    """A checkout's commit, with "+changes" if files differ from it; "unknown" outside git."""
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def short(commit: str) -> str:
    """A commit as one shows it."""
    head, plus, changes = commit.partition("+")
    return head[:9] + plus + changes


def machine() -> dict[str, Any]:
    """CPU model, cores that this process may use, memory in GiB, and the flags in `CPU_FLAGS` that it has."""
    info = _cpuinfo()
    flags = info.get("flags", "").split()
    return {
        "cpu": info.get("model name", platform.processor() or platform.machine()),
        "cpu_family": f"{info.get('cpu family', '?')}.{info.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "python": platform.python_version(),
    }


def devices() -> list[str]:
    """The kinds of JAX's devices, for a benchmark that runs JAX in this process."""
    import jax

    return [device.device_kind for device in jax.devices()]


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def save(record: Mapping[str, Any], path: Path) -> None:
    """Writes a record as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A Markdown table of rows; `columns` maps keys to headings. Missing values are blank."""
    cells = [list(columns.values()), *([_cell(row.get(key)) for key in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def _cpuinfo() -> dict[str, str]:
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


COMMIT = commit()  # of the code that runs, whatever is committed meanwhile
