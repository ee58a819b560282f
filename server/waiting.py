"""Waiting for what a client has asked for: for all of it together, and only as long as the client is there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request

from jaxpaged.engine.output import RequestOutput
from server.errors import ClientGone, error_object, logger

T = TypeVar("T")


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
