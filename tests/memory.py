"""How much memory this process takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_PROCESS = Path("/proc/self")


@contextlib.contextmanager
def takes_at_most(megabytes: float) -> Iterator[None]:
    """Fails if the block takes more at any moment, beyond what the process has when it begins."""
    (_PROCESS / "clear_refs").write_text("5")  # the peak starts anew: else an earlier one would hide this one
    before = _peak()
    yield
    assert _peak() - before < megabytes


def resident() -> float:
    """Megabytes that it has now."""
    return _megabytes("VmRSS")


def _peak() -> float:
    return _megabytes("VmHWM")


def _megabytes(name: str) -> float:
    lines = (_PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{name}:"))
