"""How far loading and warm-up are, on standard error: bars in a terminal or notebook, a few plain lines in a log."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm

_LOG_SECONDS = 10.0  # between two lines where each refresh is a new one


class _Stage(NamedTuple):
    title: str
    unit: str
    scaled: bool  # B to MB
    format: str

    def amount(self, total: int, done: int | None = None) -> str:
        """`total` units, or `done` of them, in words."""
        if not self.scaled:
            return f"{total} {self.unit}s" if done is None else f"{done} of {total} {self.unit}s"
        size = f"{tqdm.format_sizeof(total)}{self.unit}"
        return size if done is None else f"{tqdm.format_sizeof(done)}{self.unit} of {size}"


_PLAIN = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}]"  # no time left: the last programs take the longest
_STAGES = {
    "load": _Stage("Loading weights", "B", True, "{l_bar}{bar}{r_bar}"),
    "warm-up": _Stage("Preparing programs", "program", False, _PLAIN),
}


def progress_bar(**options: Any) -> tqdm:
    """A bar on standard error; options are tqdm's. In a log file, which keeps every state of it, it seldom moves."""
    return tqdm(mininterval=0.1 if _redraws() else _LOG_SECONDS, **options)


def programs_folder(option: str | None) -> Path | None:
    """Where compiled programs are kept; None: nowhere.

    Args:
      option: `compilation_cache_dir`. None: where JAX is told to, else the user's cache; "": nowhere.
    """
    if option == "":
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(option or os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache / "jaxpaged" / "xla")


class ProgressBars:
    """Tells of each stage; a context manager, whose `update` is the `progress` argument of `load_engine`.

    Attributes:
      totals: stage -> its total.
    """

    def __init__(self, cache_option: str | None = None, *, enabled: bool = True):
        """Args: cache_option: `compilation_cache_dir`, of which is told before programs are compiled."""
        self.totals: dict[str, int] = {}
        self._enabled, self._cache_option = enabled, cache_option
        self._started: dict[str, float] = {}
        self._logged: dict[str, float] = {}  # when a line of the log was last written
        self._bars: dict[str, tqdm] = {}

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self._bars.values():
            bar.close()

    def update(self, stage: str, done: int, total: int) -> None:
        """`stage` is at `done` of `total`."""
        self.totals[stage] = total
        if not self._enabled:
            return
        begins = stage not in self._started
        if begins:
            self._started[stage] = self._logged[stage] = time.monotonic()
            if stage == "warm-up":
                print(_about_programs(self._cache_option), file=sys.stderr, flush=True)
        if _redraws():
            self._draw(stage, done, total)
        else:
            self._log(stage, done, total, begins)

    def _draw(self, stage: str, done: int, total: int) -> None:
        if stage not in self._bars:
            told = _stage(stage)
            self._bars[stage] = progress_bar(
                total=total, desc=told.title, unit=told.unit, unit_scale=told.scaled, bar_format=told.format
            )
        bar = self._bars[stage]
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    def _log(self, stage: str, done: int, total: int, begins: bool) -> None:
        told, now = _stage(stage), time.monotonic()
        if begins:
            print(f"{told.title}: {told.amount(total)}", file=sys.stderr, flush=True)
        if done >= total:
            print(f"{told.title}: done after {now - self._started[stage]:.1f} s", file=sys.stderr, flush=True)
        elif now - self._logged[stage] >= _LOG_SECONDS:
            self._logged[stage] = now
            print(f"{told.title}: {told.amount(total, done)}", file=sys.stderr, flush=True)


def _redraws() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _stage(name: str) -> _Stage:
    return _STAGES.get(name, _Stage(name, "it", False, _PLAIN))


def _about_programs(cache_option: str | None) -> str:
    folder = programs_folder(cache_option)
    if folder is None:
        return "Every start compiles the programs, which takes a while: compilation_cache_dir is off."
    return f"Programs that are not in {folder} yet are compiled, which takes a while; later starts read them."
