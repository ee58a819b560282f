"""One engine core's process, as its parent sees it: started, watched, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

API_KEY_VARIABLES = ("JAXPAGED_API_KEY", "VLLM_API_KEY")
"""Environment variables that may hold the server's key, the first that counts first. Only the front has them."""

_SECONDS_TO_EXIT = 5.0  # for those whose lifelines were closed, before they are killed


class CoreChild:
    """A child process that runs `core_process`.

    Attributes:
      index: of the core.
    """

    def __init__(self, index: int, folder: Path, on_exit: Callable[[int, int], None]):
        """Args: on_exit: called with the index and the exit status, in a thread, whatever ended the process."""
        self.index = index
        self._folder, self._on_exit = folder, on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned = threading.Event()
        self._error: BaseException | None = None

    def start(self, engine: str, config: bytes, environment: Mapping[str, str]) -> None:
        """Starts the process.

        Args:
          engine: "MODULE:NAME" of the function that makes the engine.
          config: its argument, as JSON in one line.
          environment: variables beyond those of this process.
        """
        # PR_SET_PDEATHSIG fires when the *thread* that forked ends, so that thread lives as long as the child.
        self._thread = threading.Thread(
            target=self._live, args=(engine, config, environment), name=f"jaxpaged-core-{self.index}", daemon=True
        )
        self._thread.start()
        self._spawned.wait()
        if self._error is not None:
            raise self._error

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def release(self) -> None:
        """Closes its lifeline: it ends at once."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it is dead already
                self._process.stdin.close()

    def join(self, seconds: float) -> None:
        """Waits for so long until it has ended."""
        if self._process is not None and threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def kill(self) -> None:
        """Kills it, unless it has ended."""
        if self._process is not None:
            self._process.kill()

    def _live(self, engine: str, config: bytes, environment: Mapping[str, str]) -> None:
        try:
            self._process = process = self._spawn(engine, environment)
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has died: that is noticed below
                process.stdin.write(config + b"\n")
                process.stdin.flush()
        except BaseException as error:
            self._error = error
            return
        finally:
            self._spawned.set()
        self._on_exit(self.index, process.wait())

    def _spawn(self, engine: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        module = "jaxpaged.engine.core_process"
        arguments = ["--index", str(self.index), "--folder", str(self._folder), "--engine", engine]
        return subprocess.Popen(
            # -P: modules that lie in the working folder hide no others, unless this process sees them too.
            [sys.executable, "-P", "-m", module, *arguments],
            env={
                **core_environment(os.environ),
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                **environment,
            },
            stdin=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C is not for it
        )


def end_all(children: Sequence[CoreChild]) -> None:
    """Ends them: most at once, and those that hang together, within seconds however many they are."""
    for child in children:
        child.release()
    _join_all(children)
    for child in children:
        child.kill()
    _join_all(children)


def _join_all(children: Sequence[CoreChild]) -> None:
    deadline = time.monotonic() + _SECONDS_TO_EXIT
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))


def core_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """What a core is given of these variables: not the keys of the API, which only the front knows."""
    return {name: value for name, value in variables.items() if name not in API_KEY_VARIABLES}


def exit_reason(index: int, status: int) -> str:
    """What is told of a core that has exited."""
    if status >= 0:
        return f"engine core {index} exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"engine core {index} was killed by {name}" + (", maybe for want of memory" if name == "SIGKILL" else "")
