"""Server-sent events, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response

from jaxpaged.engine.output import RequestOutput
from server.errors import ClientGone, error_object, logger

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(body: object) -> bytes:
    """One event with a JSON body."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class Chunks:
    """The events of one answer, which differ in their choices."""

    def __init__(self, head: dict[str, Any]):
        """Args: head: the fields that all begin with."""
        self._head = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":'

    def event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        """One of them; `more` are fields behind the choices."""
        end = b"," + msgspec.json.encode(more)[1:] if more else b"}"
        return b"%b%b%b\n\n" % (self._head, msgspec.json.encode(choices), end)


async def event_stream(http: Request, events: AsyncGenerator[bytes, None]) -> Response:
    """A response that streams `events`; they are closed when the client goes away.

    It waits for the first event, so that a request which is refused until then gets an error status.
    """
    try:
        first = await unless_gone(http, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return _EventStream(first, events)


class _EventStream(Response):
    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]):
        super().__init__(None, 200, _HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._first, self._events = first, events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends until the events end or the client goes, whichever comes first."""
        sender = asyncio.ensure_future(self._send(send))
        watcher = asyncio.ensure_future(_client_gone(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(sender, watcher)
            await self._events.aclose()  # aborts what still runs
        if not sender.cancelled() and (error := sender.exception()) and not isinstance(error, OSError):
            raise error

    async def _send(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as e:  # the status has been sent: the error can only be an event
            status, body = error_object(e)
            if status == 500:
                logger.error("a stream failed", exc_info=e)
            await send({"type": "http.response.body", "body": event(body) + DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
        await _cancel(task, watcher)


async def _client_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several streams as they come, each with the index of its stream. One that fails ends them all."""
    if len(streams) == 1:  # no tasks between
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    outputs: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=len(streams))

    async def forward(index: int) -> None:
        try:
            async with aclosing(streams[index]) as stream:
                async for output in stream:
                    await outputs.put((index, output))
            await outputs.put((index, None))
        except Exception as e:
            await outputs.put((index, e))

    tasks = [asyncio.ensure_future(forward(i)) for i in range(len(streams))]
    try:
        running = len(streams)
        while running:
            index, output = await outputs.get()
            if output is None:
                running -= 1
            elif isinstance(output, BaseException):
                raise output
            else:
                yield index, output
    finally:
        await _cancel(*tasks)


async def finals(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> list[RequestOutput]:
    """The last output of each stream, in their order."""
    async with aclosing(merged(streams)) as outputs:
        last = {index: output async for index, output in outputs}
    return [last[i] for i in range(len(streams))]
