"""What waits for one reader, who may be slow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from jaxpaged.engine.observer import WatchedRequest
from jaxpaged.engine.output import RequestMetrics, RequestOutput

logger = logging.getLogger(__name__)


class OutputStream:
    """The outputs on their way to one reader: at most one waits, newer ones are merged into it or replace it.

    Attributes:
      external_id: the caller's id of the request, which outputs carry.
      loop: the reader's event loop.
      watched: the request as observers know it, once it has been given to a core.
      metrics, num_cached_tokens, reasons: as far as told: its times, and why each of its samples ended, by its index.
    """

    def __init__(self, external_id: str, loop: asyncio.AbstractEventLoop, arrival_time: float, *, merge: bool):
        self.external_id, self.loop = external_id, loop
        self.watched: WatchedRequest | None = None
        self.metrics, self.num_cached_tokens = RequestMetrics(arrival_time), 0
        self.reasons: dict[int, str] = {}
        self._merge = merge
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None  # the reader's, while nothing is there

    def call(self, function: Callable[[], None]) -> None:
        """Calls a function in the reader's event loop; not at all if that is closed."""
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:
            logger.debug("the reader of request %s is gone", self.external_id)

    def put(self, output: RequestOutput) -> None:
        self.note(output)
        if self._output is not None and self._merge:
            self._output.extend(output)
        else:
            self._output = output
        self._wake()

    def note(self, output: RequestOutput) -> None:
        """Takes down what an output tells of the request as a whole."""
        self.metrics, self.num_cached_tokens = output.metrics, output.num_cached_tokens
        for completion in output.outputs:
            if completion.finish_reason is not None:
                self.reasons[completion.index] = completion.finish_reason

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """The next output. Outputs that came before an error are given first."""
        if self._output is None and self._error is None:
            self._waiter = self.loop.create_future()
            await self._waiter
        if self._output is None:
            assert self._error is not None
            raise self._error
        output, self._output = self._output, None
        return output

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # a reader that has been cancelled does not wait
            waiter.set_result(None)
