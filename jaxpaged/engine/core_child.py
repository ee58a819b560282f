"""One engine core's process, as its parent sees it: started, watched, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

_ONLY_OF_THE_FRONT = ("JAXPAGED_API_KEY",)
_SECONDS_TO_EXIT = 5.0  # for one whose lifeline was closed, before it is killed


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
        # The thread that starts a child is told of by the system as its parent: it must live as long.
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

    def join(self) -> None:
        """Waits until it has ended, and kills it if that takes long."""
        if self._process is None or threading.current_thread() is self._thread:
            return
        self._thread.join(_SECONDS_TO_EXIT)
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join(_SECONDS_TO_EXIT)

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


def core_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """What a core is given of these variables: not the keys of the API, which only the front knows."""
    return {name: value for name, value in variables.items() if name not in _ONLY_OF_THE_FRONT}


def exit_reason(index: int, status: int) -> str:
    """What is told of a core that has exited."""
    if status >= 0:
        return f"engine core {index} exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"engine core {index} was killed by {name}" + (", maybe for want of memory" if name == "SIGKILL" else "")
