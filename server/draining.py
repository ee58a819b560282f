"""The HTTP server's end: what runs may finish, and then everybody gets an answer before anything is taken away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn

from jaxpaged.engine.async_llm import AsyncLLM

logger = logging.getLogger("jaxpaged.server")

# After the time to drain: for aborted requests to be answered, and for those whose clients do not read to notice.
SECONDS_TO_ANSWER = 3.0
SECONDS_TO_CLOSE = 2.0
_SECONDS_A_LOOK = 0.05


class DrainingServer(uvicorn.Server):
    """A uvicorn server that aborts what still runs when its time is over, where uvicorn would cancel it.

    A second Ctrl-C ends that time, a third one does not wait for the answers either.
    """

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, seconds: float):
        """Args: seconds: how long running requests may go on."""
        config.timeout_graceful_shutdown = round(seconds + SECONDS_TO_ANSWER + SECONDS_TO_CLOSE) + 1
        super().__init__(config)
        self._llm, self._seconds, self._is_over = llm, seconds, False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("shutting down: %d requests may go on for %g s", self._llm.num_unfinished, self._seconds)
        drain = asyncio.create_task(self._drain())
        drain.add_done_callback(_log_failure)
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT and not self._is_over:
            self._is_over = True
        else:
            super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's; and a terminal that is closed ends the server as SIGTERM does."""
        with super().capture_signals():
            in_main = threading.current_thread() is threading.main_thread()
            if not in_main or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # with nohup
                yield
                return
            before = signal.signal(signal.SIGHUP, lambda _, frame: self.handle_exit(signal.SIGTERM, frame))
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._seconds
        while loop.time() < end and not self._is_over:
            await asyncio.sleep(_SECONDS_A_LOOK)
        self._llm.abort_all()
        await asyncio.sleep(SECONDS_TO_ANSWER)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the running requests could not be ended", exc_info=error)
