"""Traces of this process, with JAX's profiler."""

from __future__ import annotations

import jax

from jaxpaged.errors import InvalidRequestError


class Profiler:
    """At most one trace at a time; a process has one profiler."""

    def __init__(self) -> None:
        self._runs = False

    def start(self, folder: str) -> None:
        """Starts a trace, to be written into a folder below this one.

        Raises:
          InvalidRequestError: one is being taken.
        """
        if self._runs:
            raise InvalidRequestError("a profile is being taken already: stop it first")
        try:
            jax.profiler.start_trace(folder)
        except RuntimeError as e:  # somebody else in this process has started one
            raise InvalidRequestError(f"a profile is being taken already: {e}") from e
        self._runs = True

    def stop(self) -> None:
        """Ends the trace and writes it.

        Raises:
          InvalidRequestError: none is being taken.
        """
        if not self._runs:
            raise InvalidRequestError("no profile is being taken: start one first")
        self._runs = False
        jax.profiler.stop_trace()
