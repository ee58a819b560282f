"""What is sent of a stream, and by which way; without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from jaxpaged.engine.output import CompletionOutput, RequestMetrics, RequestOutput
from jaxpaged.errors import QueueFullError
from server.chunks import Chunks
from server.errors import ClientGone
from server.failures import Failures
from server.stream import EventStream


class Texts:
    """Choices that are texts."""

    reasoning_tokens = None

    def pieces(self, output: RequestOutput) -> list[dict[str, Any]]:
        return [{"text": output.text}]

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        return {"prompt": len(output.prompt_token_ids)}


class Streamed:
    """Streams prompts of one token; of a prompt come texts, pauses, or an error.

    Attributes:
      sent: the messages of the response, each with the way it took.
      open: prompts whose streams are open.
    """

    def __init__(self, *prompts: list[str | float | Exception]):
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.open = 0
        self._prompts, self._gone = prompts, asyncio.Event()

    async def run(self) -> None:
        chunks = Chunks({"id": "x"}, None, [Texts()] * len(self._prompts), Failures(len(self._prompts), "x"))
        response = EventStream([self._stream(prompt) for prompt in self._prompts], chunks)
        scope = {"type": "http", "state": {"send": self._by("past")}}
        await response(scope, self._receive, self._by("through"))

    async def leave(self) -> None:
        self._gone.set()

    async def _stream(self, prompt: list[str | float | Exception]) -> AsyncGenerator[RequestOutput, None]:
        self.open += 1
        try:
            for text in prompt:
                await asyncio.sleep(0.001)
                if isinstance(text, Exception):
                    raise text
                if isinstance(text, float | int):
                    await asyncio.sleep(text)
                    continue
                yield RequestOutput("x", None, [5], [CompletionOutput(0, text, [7])], False, 0, RequestMetrics(0.0))
        finally:
            self.open -= 1

    async def _receive(self) -> dict[str, str]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def _by(self, way: str) -> Any:
        async def send(message: dict[str, Any]) -> None:
            self.sent.append((way, message))
            await asyncio.sleep(0.001)  # as for a slow reader

        return send

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for _, message in self.sent).decode()


def test_layers_see_the_start_and_the_end_of_a_stream() -> None:
    """Once each, however many prompts there are; what the prompt is told of comes first."""
    streamed = Streamed(list("abc"), list("de"), list("f"))
    asyncio.run(streamed.run())
    (first, start), *parts, (last, end) = streamed.sent
    assert (first, start["type"], last, end["more_body"]) == ("through", "http.response.start", "through", False)
    assert {(way, part["more_body"]) for way, part in parts} == {("past", True)} and len(parts) == 6
    events = [line.removeprefix("data: ") for line in streamed.body.split("\n\n")]
    assert events[-2:] == ["[DONE]", ""]
    assert sorted(json.loads(event)["choices"][0]["text"] for event in events[:-2]) == list("abcdef")
    assert ["prompt" in event for event in events[:-2]] == [True] + [False] * 5


def test_one_prompt_that_fails_ends_the_others() -> None:
    """With an event if something has been sent, else with the error itself, which becomes a status."""
    endless: list[str | float | Exception] = ["a"] * 10_000
    streamed = Streamed(endless, ["b", QueueFullError("full")])
    asyncio.run(asyncio.wait_for(streamed.run(), 30))
    assert streamed.body.endswith("data: [DONE]\n\n") and '"queue_full"' in streamed.body
    assert not streamed.open and not streamed.sent[-1][1]["more_body"]
    at_once = Streamed(["a"], [QueueFullError("full")])  # while the other starts the response
    asyncio.run(at_once.run())
    assert [message["type"] for _, message in at_once.sent].count("http.response.start") == 1
    assert '"queue_full"' in at_once.body and not at_once.sent[-1][1]["more_body"]
    refused = Streamed([QueueFullError("full")], [0.2, "a"])
    with pytest.raises(QueueFullError):
        asyncio.run(refused.run())
    assert (refused.open, refused.sent) == (0, [])


def test_what_a_gone_client_asked_for_is_closed() -> None:
    async def run(streamed: Streamed, delay: float) -> None:
        task = asyncio.ensure_future(streamed.run())
        await asyncio.sleep(delay)
        await streamed.leave()
        await task

    streamed = Streamed(["a"] * 10_000, ["b"] * 10_000)
    asyncio.run(run(streamed, 0.2))
    assert streamed.sent and not streamed.open
    waiting = Streamed(["a"])
    with pytest.raises(ClientGone):
        asyncio.run(run(waiting, 0.0))
    assert (waiting.open, waiting.sent) == (0, [])


class Broken(Streamed):
    """One whose connection takes no part of the answer."""

    def _by(self, way: str) -> Any:
        async def send(message: dict[str, Any]) -> None:
            self.sent.append((way, message))
            if "body" in message:
                raise RuntimeError("broken")

        return send


def test_what_cannot_be_sent_is_not_answered_with_more() -> None:
    """Nor is the sending's fault told as one of the answer."""
    broken = Broken(["a", "b"])
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(broken.run())
    assert [message["type"] for _, message in broken.sent] == ["http.response.start", "http.response.body"]
    assert not broken.open


class AtOnce(Streamed):
    """One whose prompts fail all at once: when the texts have been sent, or at the start if there are none."""

    async def _stream(self, prompt: list[str | float | Exception]) -> AsyncGenerator[RequestOutput, None]:
        if isinstance(error := prompt[0], Exception):
            await self._fail.wait()
            raise error
        async for output in super()._stream(prompt):
            yield output
        self._fail.set()

    async def run(self) -> None:
        self._fail = asyncio.Event()
        if isinstance(self._prompts[0][0], Exception):
            self._fail.set()
        await super().run()


def test_of_prompts_that_fail_at_once_each_fault_of_ours_is_logged_once(caplog) -> None:
    """One is the answer; where none has begun, it is raised, and logged by whoever makes a status of it."""
    faults: list[Exception] = [KeyError("first"), KeyError("second"), QueueFullError("full"), KeyError("third")]
    begun = AtOnce(["a"], *([fault] for fault in faults))
    asyncio.run(begun.run())
    assert begun.body.endswith("data: [DONE]\n\n") and '"internal error"' in begun.body
    logged = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert sorted(logged) == ["'first'", "'second'", "'third'"]
    caplog.clear()
    with pytest.raises(KeyError, match="first"):
        asyncio.run(AtOnce(*([fault] for fault in faults)).run())
    logged = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert sorted(logged) == ["'second'", "'third'"]
