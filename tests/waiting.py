"""Waiting for what happens elsewhere. It gives up late, for machines that are busy."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

SECONDS = 60.0


def wait_for(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Returns when it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.005)


async def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """`wait_for` in an event loop, which goes on meanwhile."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        await asyncio.sleep(0.002)


def accepts(port: int) -> bool:
    """Whether somebody on this machine listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
