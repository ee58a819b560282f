"""The process of one engine core, started by `CoreChild` as `python -m jaxpaged.engine.core_process`.

Its standard input is its lifeline: the first line is the engine's config, and its end means that the front has died,
or wants this process to.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Runs the core to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", type=int, required=True, help="of this core")
    parser.add_argument("--folder", type=Path, required=True, help="where the sockets are")
    parser.add_argument("--engine", required=True, metavar="MODULE:NAME", help="function that makes the engine")
    arguments = parser.parse_args()
    logging.basicConfig(format=f"%(asctime)s %(levelname)-7s [core {arguments.index}] %(message)s")  # as the front's
    # Ctrl-C and what a supervisor sends to all processes are for the front: it drains, and then ends this process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(AttributeError):  # Linux only; elsewhere the lifeline must do
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    options = _read_line()
    threading.Thread(target=_die_with_front, name="jaxpaged-lifeline", daemon=True).start()
    # Imported only now, on the lifeline: this takes seconds.
    import msgspec

    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.core_service import serve_core

    serve_core(msgspec.json.decode(options, type=EngineConfig), arguments.engine, arguments.folder, arguments.index)


def _read_line() -> bytes:
    """Not through `sys.stdin`: what that has read ahead would be lost to `_die_with_front`."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            os._exit(0)
        line += piece
    return line


def _die_with_front() -> None:
    """Ends this process at once, whatever it does, when the other end of the lifeline is closed."""
    while os.read(0, 1 << 16):
        pass
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # without waiting for threads that may be anywhere
