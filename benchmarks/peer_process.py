"""An engine in a process of its own: started, asked for work, stopped while others are measured."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("peer_worker.py")


class PeerFailedError(RuntimeError):
    """An engine could not be started, died, or took too long."""


class Peer:
    """One running engine.

    Attributes:
      name: the engine's.
      ready: its first message: seconds from the process's start to its first token, versions, notes.
      closed: whether it has been ended.
    """

    def __init__(
        self,
        name: str,
        python: Path,
        job: Mapping[str, Any],
        environment: Mapping[str, str],
        *,
        log: Path,
        timeout: float = 900.0,
    ):
        """Starts the engine and waits until it has made a first token.

        Args:
          job: what `peer_worker` needs to load the model.
          environment: variables to add.
          log: file for whatever the engine prints.

        Raises:
          PeerFailedError: it did not get there.
        """
        self.name, self.closed = name, False
        self._log = log
        start = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(python), "-P", str(WORKER), json.dumps(dict(job))],  # -P: our file names must not shadow theirs
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=WORKER.parents[1],
                env={**os.environ, **environment},
                start_new_session=True,  # a group of its own, which can be stopped as one
            )
        try:
            self.ready = self._read(timeout)
        except BaseException:
            self.close()
            raise
        self.ready["seconds"] = time.perf_counter() - start
        self._signal(signal.SIGSTOP)

    def run(self, work: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        """Lets the engine go on, does one piece of work, and stops it again.

        Returns:
          `seconds`, `first_token_s` (until the last request had its first token), and `token_ids` of every output.

        Raises:
          PeerFailedError: it died, or took longer.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(dict(work)).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerFailedError(self._told(f"it died ({error})")) from error
        reply = self._read(timeout)
        self._signal(signal.SIGSTOP)
        return reply

    def close(self) -> None:
        """Ends the engine and every process that it started."""
        self.closed = True
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=15)
        self._signal(signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):  # a dead engine's unread input
            self._process.communicate()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self, timeout: float) -> dict[str, Any]:
        """The next message: a line of JSON."""
        assert self._process.stdout is not None
        deadline, line = time.monotonic() + timeout, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise PeerFailedError(self._told(f"no answer in {timeout:.0f} s"))
                part = os.read(self._process.stdout.fileno(), 1 << 20)
                if not part:
                    raise PeerFailedError(self._told(f"it ended with status {self._process.wait()}"))
                line += part
        return json.loads(line)

    def _told(self, what: str) -> str:
        """`what`, with the last line that the engine printed."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"{what}; its last words: {lines[-1][:300] if lines else 'none'}"
