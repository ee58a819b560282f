"""Counting compilations, and keeping compiled programs on disk."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
from jax import monitoring

from jaxpaged.progress import programs_folder

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


class CompilationCounter(threading.local):
    """Counts the XLA compilations of the current thread (a persistent-cache hit counts too: it stalls as well).

    By thread, since in research code other threads and other functions of the same process compile as they like.

    Attributes:
      count: compilations by this thread so far.
      cache_hits: those of them that JAX's cache spared.
    """

    count = 0
    cache_hits = 0

    def on_event(self, event: str, duration_secs: float, **_: object) -> None:
        """jax calls this in the thread that compiled."""
        if event == _COMPILE_EVENT:
            self.count += 1

    def on_plain_event(self, event: str, **_: object) -> None:
        """As `on_event`, of what takes no time."""
        if event == _CACHE_HIT_EVENT:
            self.cache_hits += 1


compilations = CompilationCounter()
monitoring.register_event_duration_secs_listener(compilations.on_event)  # for good: jax cannot remove listeners
monitoring.register_event_listener(compilations.on_plain_event)


def use_persistent_cache(folder: str | None) -> Path | None:
    """Keeps compiled programs in `folder`; None: where JAX was told to, or in the user's cache; "": not at all.

    Returns: the folder, if there is one on this machine, and JAX was not told to keep nothing.
    """
    if folder == "":
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    if folder is not None or not jax.config.values["jax_compilation_cache_dir"]:
        elsewhere = folder is not None and "://" in folder  # JAX can also keep them in a bucket
        jax.config.update("jax_compilation_cache_dir", folder if elsewhere else str(programs_folder(folder)))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    told = jax.config.values["jax_compilation_cache_dir"]
    return Path(told) if "://" not in told and jax.config.values["jax_enable_compilation_cache"] else None
