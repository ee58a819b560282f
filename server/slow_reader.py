"""A client that does not take its answers: it is given up, and with it what they hold."""

from __future__ import annotations

import asyncio


class SlowReaderWatch:
    """Closes a connection from whose buffer nothing has gone for some time.

    It is watched while writing pauses, or while what an answer has left is on its way: the buffer can only shrink then.
    """

    def __init__(self, transport: asyncio.Transport, seconds: float):
        self._transport, self._seconds = transport, seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Watches, unless it does already."""
        if self._timer is None:
            self._look_later(self._transport.get_write_buffer_size())

    def stop(self) -> None:
        """The client reads, or has gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self, size: int) -> None:
        self._timer = self._loop.call_later(self._seconds, self._look, size)

    def _look(self, before: int) -> None:
        self._timer = None
        size = self._transport.get_write_buffer_size()
        if size and size >= before:
            self._transport.abort()  # the request behind it is aborted as any whose client has gone
        elif size:
            self._look_later(size)
