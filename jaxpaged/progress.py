"""Progress bars of loading and warm-up, on standard error."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.auto import tqdm

# Stage of `load_engine` -> description, unit, whether to scale the unit (B to MB).
_STAGES = {"load": ("Loading weights", "B", True), "warm-up": ("Compiling programs", "program", False)}


_LOG_SECONDS = 10.0  # between two lines where each refresh is a new one


def progress_bar(**options: Any) -> tqdm:
    """A bar on standard error; options are tqdm's. In a log file, which keeps every state of it, it seldom moves."""
    redraws = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(mininterval=0.1 if redraws else _LOG_SECONDS, **options)


class ProgressBars:
    """One bar a stage; a context manager, whose `update` is the `progress` argument of `load_engine`.

    Attributes:
      totals: stage -> its total.
    """

    def __init__(self, *, enabled: bool = True):
        self.totals: dict[str, int] = {}
        self._enabled = enabled
        self._bars: dict[str, tqdm] = {}

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self._bars.values():
            bar.close()

    def update(self, stage: str, done: int, total: int) -> None:
        """Moves the bar of `stage` to `done` of `total`."""
        self.totals[stage] = total
        if not self._enabled:
            return
        if stage not in self._bars:
            description, unit, scale = _STAGES.get(stage, (stage, "it", False))
            self._bars[stage] = progress_bar(total=total, desc=description, unit=unit, unit_scale=scale)
        bar = self._bars[stage]
        bar.update(done - bar.n)
        if done >= total:
            bar.close()
