"""The Unix sockets between a front and its cores: in a folder that only this user can enter, and for nobody else."""

from __future__ import annotations

import tempfile
from pathlib import Path

import zmq

_MAX_FOLDER = 80  # characters: the path of a Unix socket may have about a hundred


def private_folder() -> Path:
    """A new folder for sockets, with mode 0700."""
    folder = Path(tempfile.mkdtemp(prefix="jaxpaged-"))
    if len(str(folder)) <= _MAX_FOLDER:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="jaxpaged-", dir="/tmp"))


def front_socket(folder: Path) -> Path:
    """Where the front listens."""
    return folder / "front.sock"


def core_socket(folder: Path, index: int) -> Path:
    """Where a core listens."""
    return folder / f"core-{index}.sock"


def listening(context: zmq.Context, path: Path) -> zmq.Socket:
    """A socket that receives there, without limit: whoever has it always reads."""
    socket = context.socket(zmq.PULL)
    socket.rcvhwm = 0
    socket.bind(f"ipc://{path}")
    path.chmod(0o600)
    return socket


def sending(context: zmq.Context, path: Path) -> zmq.Socket:
    """A socket that sends there, and never waits; its receiver need not be there yet."""
    socket = context.socket(zmq.PUSH)
    socket.sndhwm = socket.linger = 0
    socket.connect(f"ipc://{path}")
    return socket
