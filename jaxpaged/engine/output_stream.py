"""What waits for one reader, who may be slow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from jaxpaged.engine.output import RequestOutput

logger = logging.getLogger(__name__)


class OutputStream:
    """The outputs on their way to one reader: at most one waits, newer ones are merged into it or replace it."""

    def __init__(self, external_id: str, loop: asyncio.AbstractEventLoop, *, merge: bool):
        self.external_id, self.loop = external_id, loop
        self._merge = merge
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._ready = asyncio.Event()

    def call(self, function: Callable[[], None]) -> None:
        """Calls a function in the reader's event loop; not at all if that is closed."""
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:
            logger.debug("the reader of request %s is gone", self.external_id)

    def put(self, output: RequestOutput) -> None:
        if self._output is not None and self._merge:
            self._output.extend(output)
        else:
            self._output = output
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._ready.set()

    async def get(self) -> RequestOutput:
        """The next output. Outputs that came before an error are given first."""
        await self._ready.wait()
        if self._output is None:
            assert self._error is not None
            raise self._error
        output, self._output = self._output, None
        if self._error is None:
            self._ready.clear()
        return output
