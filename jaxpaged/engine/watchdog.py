"""Notices cores that live and yet do nothing: stopped by a signal, or in a step that does not end."""

from __future__ import annotations

import threading
from collections.abc import Callable

_LOOKS = 10


class Watchdog(threading.Thread):
    """Asks every core for a sign of life, again and again.

    It counts its own looks and no time, so that a machine that slept, and this process with it, blames nobody.
    """

    def __init__(self, num_cores: int, seconds: float, ask: Callable[[int], None], on_silence: Callable[[int], None]):
        """Args:
        seconds: for so long a core may say nothing.
        ask: sends a core what it answers between two steps.
        on_silence: called with the index of one that says nothing.
        """
        super().__init__(name="jaxpaged-watchdog", daemon=True)
        self._pause, self._ask, self._on_silence = seconds / _LOOKS, ask, on_silence
        self._silent_looks = [0] * num_cores
        self._stopped = threading.Event()

    def heard(self, core: int) -> None:
        """A core has said something."""
        self._silent_looks[core] = 0

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.wait(self._pause):
            for core, looks in enumerate(self._silent_looks):
                if looks == _LOOKS:
                    self._on_silence(core)
                self._silent_looks[core] += 1
                self._ask(core)
