"""Calls of methods of the engine cores, and the coroutines that wait for their answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpaged.engine.core_client import EngineCoreClient
from jaxpaged.engine.messages import Answer, Call


@dataclass(frozen=True, slots=True)
class _Waiting:
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    def settle(self, result: Any, error: BaseException | None) -> None:
        """In any thread."""
        with contextlib.suppress(RuntimeError):  # that loop has been closed
            self.loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Calls:
    """Calls that wait for their answers."""

    def __init__(self, client: EngineCoreClient, check_alive: Callable[[], None]):
        """Args: check_alive: raises if no answer may come any more."""
        self._client, self._check_alive = client, check_alive
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting] = {}

    async def every_core(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of every core; what they return, in their order."""
        return await asyncio.gather(*(self.one(i, method, *arguments) for i in range(self._client.num_cores)))

    async def one(self, core: int, method: str, *arguments: Any) -> Any:
        """Calls a method of one core, between two of its steps.

        Raises: what it raised there.
        """
        self._check_alive()
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        waiting = self._waiting[number] = _Waiting(loop, loop.create_future())
        try:
            self._client.call(core, Call(number, method, list(arguments)))
            self._check_alive()  # what ended meanwhile, in another thread, may have missed this call
            return await waiting.future
        finally:
            self._waiting.pop(number, None)

    def answer(self, message: Answer) -> None:
        """Takes a core's answer, in any thread."""
        waiting = self._waiting.get(message.call_id)
        if waiting is not None:
            waiting.settle(message.result, message.failure and message.failure.exception())

    def fail_all(self, error: BaseException) -> None:
        """Ends all of them with an error, in any thread."""
        for waiting in list(self._waiting.values()):
            waiting.settle(None, error)
