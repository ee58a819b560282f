"""Server-sent events, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from jaxpaged.engine.output import RequestOutput
from server.answers import LONG, encoded, length
from server.chunks import Chunks, error_event
from server.errors import ClientGone, answered_error, error_object, logger

T = TypeVar("T")
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
                    if length(output) < LONG:
                        body = chunks.write(index, output)
                    else:  # a whole prompt's log-probabilities, say
                        body = await asyncio.to_thread(chunks.write, index, output, encoded)
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
            self._cannot_send = True  # so not what has happened either
            raise

    async def _begin(self, send: Any) -> None:
        """Starts the response unless it has been: the first of several streams does."""
        async with self._beginning:
            if not self._begun:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                self._begun = True


async def unless_gone(http: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client goes away first: then raises ClientGone."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_client_gone(http.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _cancel(task, watcher, raised=sys.exception())


async def _client_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any], raised: BaseException | None) -> None:
    """Ends tasks. Of those that have failed one's error is raised: of the others, faults of ours go to the log."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
    for task in tasks:
        if task.cancelled() or (error := task.exception()) is None or error is raised:
            continue
        if error_object(error)[0] == 500:
            logger.error("what nobody waits for any more failed", exc_info=error)


async def together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of several coroutines, in their order. One that fails ends them all."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(*tasks, raised=sys.exception())


async def finals(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> list[RequestOutput]:
    """The last output of each stream, in their order."""
    return await together([_last(stream) for stream in streams])


async def _last(stream: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    async with aclosing(stream) as outputs:
        return [output async for output in outputs][-1]
