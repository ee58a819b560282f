"""A whole answer: its JSON, or an error if nothing came of the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from fastapi.responses import Response

from jaxpaged.core.request import FAILURES, GRAMMAR_STUCK
from jaxpaged.core.step import NONE_ALLOWED
from jaxpaged.engine.output import PositionLogprobs, RequestOutput
from server.errors import APIError, logger, without_details

LONG = 2048  # what is to be written, from which on that is done beside the event loop: tokens, and their rivals
_CHARS_A_TOKEN = 8
_SLICE = 256  # elements of a list that are encoded at once: meanwhile no other thread runs
_OWN_FAULTS = str(FAILURES[NONE_ALLOWED].stop_reason), GRAMMAR_STUCK  # how a reason begins that is the client's


async def json_answer(build: Callable[[], dict[str, Any]], outputs: Sequence[RequestOutput]) -> Response:
    """The response to a request.

    Args:
      build: makes its body.
      outputs: what it is made of: how long that takes goes by their texts and logprobs.
    """
    if sum(map(length, outputs)) < LONG:
        content = msgspec.json.encode(build())
    else:
        content = await asyncio.to_thread(lambda: encoded(build()))
    return Response(content, media_type="application/json")


def length(output: RequestOutput) -> int:
    """How much there is to write of it, in tokens and their rivals; about."""
    total = _num_records(output.prompt_logprobs) if output.prompt_logprobs else 0
    for completion in output.outputs:  # a loop, and no call without need: this is done for every token
        total += len(completion.text) // _CHARS_A_TOKEN
        if completion.logprobs:
            total += _num_records(completion.logprobs)
    return total


def _num_records(positions: Sequence[PositionLogprobs | None]) -> int:
    last = positions[-1]
    return 0 if last is None else len(positions) * (1 + len(last.top))


def encoded(value: Any, depth: int = 0) -> bytes:
    """JSON of an answer, made in slices. The lists of choices and of positions are near its root."""
    if isinstance(value, dict) and depth < 5:
        pairs = (msgspec.json.encode(key) + b":" + encoded(item, depth + 1) for key, item in value.items())
        return b"{" + b",".join(pairs) + b"}"
    if isinstance(value, list) and depth < 2:
        return b"[" + b",".join(encoded(item, depth + 1) for item in value) + b"]"
    if isinstance(value, list) and len(value) > _SLICE:
        slices = (value[i : i + _SLICE] for i in range(0, len(value), _SLICE))
        return b"[" + b",".join(msgspec.json.encode(part)[1:-1] for part in slices) + b"]"
    return msgspec.json.encode(value)


class Failures:
    """Which choices of a request failed. Once they all have, there is nothing to answer but an error.

    As long as one has not, the others' `finish_reason` is "error", and `stop_reason` what a client may know of why.
    """

    def __init__(self, num_choices: int, request_id: str):
        self._left, self._request_id = num_choices, request_id

    def check(self, outputs: Iterable[RequestOutput]) -> None:
        """Counts those that failed in these outputs: all there are, or what is new.

        Raises:
          APIError: none is left.
        """
        for output in outputs:
            for choice in output.outputs:
                if choice.finish_reason == "error":
                    self._left -= 1
                    logger.debug("request %s: generation failed: %s", self._request_id, choice.stop_reason)
                    choice.stop_reason = told_reason(choice.stop_reason)
                    if not self._left:
                        raise _failed(choice.stop_reason)


def told_reason(reason: int | str | None) -> str:
    """Why a choice failed, as its client may know: of a fault of ours, no details."""
    return str(reason) if str(reason).startswith(_OWN_FAULTS) else without_details(str(reason))


def _failed(reason: str) -> APIError:
    status = 400 if reason.startswith(_OWN_FAULTS) else 500
    param = "structured_outputs" if reason.startswith(GRAMMAR_STUCK) else None
    return APIError(status, f"the generation failed: {reason}", param=param, code="generation_error")
