"""Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from jaxpaged.engine.output import RequestOutput
from server.answers import LONG, length, written
from server.chunks import Chunks, error_event
from server.errors import ClientGone, answered_error, logger
from server.waiting import together, unless_gone

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(Response):
    """A response that streams an answer as the outputs come; what still runs is aborted when the client goes away.

    Nothing is sent before the first event, so that a request which is refused until then gets an error status.
    """

    def __init__(self, streams: Sequence[AsyncGenerator[RequestOutput, None]], chunks: Chunks):
        """Args: streams: the outputs of each prompt."""
        super().__init__(None, 200, _HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._streams, self._chunks = streams, chunks
        self._begun, self._beginning = False, asyncio.Lock()
        self._cannot_send = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends until the outputs end or the client goes, whichever comes first."""
        try:
            await unless_gone(Request(scope, receive), self._send(send, scope["state"]["send"]))
        except (ClientGone, OSError):
            if not self._begun:
                raise

    async def _send(self, send: Any, send_past_layers: Any) -> None:
        """Args: send_past_layers: for what comes between the start and the end, which no layer looks at."""
        try:
            await together([self._forward(i, s, send, send_past_layers) for i, s in enumerate(self._streams)])
            await self._begin(send)
            last = self._chunks.end()
        except Exception as e:
            if not self._begun or self._cannot_send:
                raise
            status, body = answered_error(e)  # the status has been sent: the error can only be an event
            if status == 500:
                logger.error("a stream failed", exc_info=e)
            last = error_event(body)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _forward(
        self, index: int, stream: AsyncGenerator[RequestOutput, None], send: Any, send_past_layers: Any
    ) -> None:
        chunks = self._chunks
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    chunks.count(index, output)
                    if (size := length(output)) < LONG:  # as `written` does, without its cost for every token
                        body = chunks.write(index, output)
                    else:
                        body = await written(size, chunks.write, index, output)
                    if not self._begun:
                        await self._begin(send)
                    if body:
                        await self._pass_on(send_past_layers, body)
        except Exception:
            async with self._beginning:  # a start that another stream has begun is not cut off
                raise

    async def _pass_on(self, send: Any, body: bytes) -> None:
        try:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception:
            self._cannot_send = True  # so an error event cannot be sent either
            raise

    async def _begin(self, send: Any) -> None:
        """Starts the response unless it has been: the first of several streams does."""
        async with self._beginning:
            if not self._begun:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                self._begun = True
