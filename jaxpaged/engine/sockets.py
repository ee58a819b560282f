"""The Unix sockets between a front and its cores, in a `PrivateFolder`."""

from __future__ import annotations

from pathlib import Path

import zmq


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
