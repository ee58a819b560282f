"""A server with all its processes: started, stopped while others are measured, asked for its CPU time, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

_START = 19  # field of `_stat`: when the process was started
_TICKS = os.sysconf("SC_CLK_TCK")


class ServerFailedError(RuntimeError):
    """A server could not be started."""


class ServerProcess:
    """One running server.

    Attributes:
      name: what results call it.
      url: http://HOST:PORT.
      seconds: what its start took, to the first healthy answer.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        timeout: float = 600.0,
    ):
        """Starts it and waits until GET /health is 200.

        Args:
          command: must make it listen on 127.0.0.1 at `port`.
          log: file for whatever it prints.

        Raises:
          ServerFailedError: it did not get there.
        """
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._log = log
        self._names: dict[int, str] = {}  # of its processes, in the order in which they were seen first
        start = time.monotonic()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        try:
            self._wait(start + timeout)
        except BaseException:
            self.close()
            raise
        self.seconds = time.monotonic() - start

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self._process.pid

    def pause(self) -> None:
        """Stops all its processes until `resume`: idle threads cost those that are measured nothing."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far of each of its processes: of the one that was started ("front") and of those it started.

        A child keeps its name for good, also when another one has ended.
        """
        spent = {}
        for pid in family(self._process.pid):
            name = self._names.setdefault(pid, f"child {len(self._names)}" if self._names else "front")
            spent[name] = cpu_seconds(pid)
        return spent

    def close(self) -> None:
        """Ends it and every process that it started."""
        members = {pid: _stat(pid)[_START:] for pid in family(self._process.pid)}
        self.resume()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
        for pid, start in members.items():
            with contextlib.suppress(ProcessLookupError):
                if start and _stat(pid)[_START:][:1] == start[:1]:  # not another one under its number
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in family(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _wait(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if (status := self._process.poll()) is not None:
                raise ServerFailedError(f"{self.name} ended with status {status}; {self._last_words()}")
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                _opener.open(f"{self.url}/health", timeout=10) as answer,
            ):
                if answer.status == 200:
                    return
            time.sleep(0.1)
        raise ServerFailedError(f"{self.name} was not healthy in time; {self._last_words()}")

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"its last words: {lines[-1][:300] if lines else 'none'}"


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine, whatever proxy is set


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def family(pid: int) -> list[int]:
    """A process and all that descend from it, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _stat(int(entry.name))):
            children.setdefault(int(parent[1]), []).append(int(entry.name))
    found = [pid]
    for member in found:
        found += sorted(children.get(member, []))
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, all threads; 0 if it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []
