"""Calls of methods of the cores: every one ends, whatever becomes of its core."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxpaged.engine.calls import Calls
from jaxpaged.engine.messages import Answer, Call, Failure
from jaxpaged.errors import EngineDeadError, InvalidRequestError


class Client:
    """Two cores that answer when they are told to."""

    num_cores = 2

    def __init__(self) -> None:
        self.calls: list[tuple[int, Call]] = []
        self.error: EngineDeadError | None = None

    def call(self, core: int, call: Call) -> None:
        self.calls.append((core, call))

    def check_alive(self) -> None:
        if self.error is not None:
            raise self.error


def play(test: Any) -> None:
    async def main() -> None:
        client: Any = Client()
        calls = Calls(client, client.check_alive)
        await asyncio.wait_for(test(client, calls), 60)
        assert not calls._waiting

    asyncio.run(main())


def test_answers_come_in_the_order_of_the_cores() -> None:
    async def test(client: Client, calls: Calls) -> None:
        task = asyncio.ensure_future(calls.every_core("snapshot", 1, "x"))
        while len(client.calls) < 2:
            await asyncio.sleep(0)
        for core, call in reversed(client.calls):
            assert (call.method, call.arguments) == ("snapshot", [1, "x"])
            calls.answer(Answer(call.call_id, f"of {core}"))
        assert await task == ["of 0", "of 1"]
        calls.answer(Answer(99))  # nobody waits for it

    play(test)


def test_what_was_raised_there_is_raised_here() -> None:
    async def test(client: Client, calls: Calls) -> None:
        task = asyncio.ensure_future(calls.one(1, "stop_profile"))
        while not client.calls:
            await asyncio.sleep(0)
        calls.answer(Answer(client.calls[0][1].call_id, failure=Failure("InvalidRequestError", "start one first")))
        with pytest.raises(InvalidRequestError, match="start one first"):
            await task

    play(test)


def test_a_death_ends_those_that_wait() -> None:
    async def test(client: Client, calls: Calls) -> None:
        tasks = [asyncio.ensure_future(calls.one(core, "snapshot")) for core in range(2)]
        while len(client.calls) < 2:
            await asyncio.sleep(0)
        calls.fail_all(EngineDeadError("killed"))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(result) for result in results] == ["killed"] * 2

    play(test)


def test_a_death_while_a_call_is_sent_ends_it_too() -> None:
    """The core has failed what waited, and takes what is sent without a word."""

    async def test(client: Client, calls: Calls) -> None:
        def die(*_: Any) -> None:
            client.error = EngineDeadError("killed")

        client.call = die  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError, match="killed"):
            await calls.one(0, "snapshot")

    play(test)


def test_nothing_is_sent_to_the_dead() -> None:
    async def test(client: Client, calls: Calls) -> None:
        client.error = EngineDeadError("killed")
        with pytest.raises(EngineDeadError, match="killed"):
            await calls.every_core("reset_prefix_cache")
        assert not client.calls

    play(test)
