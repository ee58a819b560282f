"""Counting compilations, and keeping compiled programs on disk."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
from jax import monitoring

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts every XLA compilation of this process (a persistent-cache hit counts too: it stalls as well).

    Attributes:
      count: compilations since the process started listening.
      seconds: time spent in them, summed over threads.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._lock = threading.Lock()
        monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration: float, **_: object) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self.count += 1
                self.seconds += duration


compilations = CompilationCounter()  # jax's listeners are per process and cannot be removed: one is enough


def use_persistent_cache(folder: str | None) -> None:
    """Keeps compiled programs in `folder`; None: the user's cache folder; "": not at all."""
    if folder == "":
        return
    path = Path(folder) if folder else Path.home() / ".cache" / "jaxpaged" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
