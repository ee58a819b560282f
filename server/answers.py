"""JSON of answers. What takes long is written beside the event loop, in slices: others are served meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi.responses import Response

from jaxpaged.engine.output import PositionLogprobs, RequestOutput

LONG = 2048  # tokens and their rivals, from which on they are written beside the event loop: a few milliseconds' work
_CHARS_A_TOKEN = 8
_SLICE = 256  # elements of a list that are encoded at once: meanwhile no other thread runs


async def json_answer(build: Callable[[], dict[str, Any]], outputs: Sequence[RequestOutput]) -> Response:
    """The response to a request.

    Args:
      build: makes its body.
      outputs: what it is made of: how long that takes goes by their texts and logprobs.
    """
    content = await written(sum(map(length, outputs)), lambda encode: encode(build()))
    return Response(content, media_type="application/json")


async def written(size: int, write: Callable[..., bytes], *args: Any) -> bytes:
    """What `write` makes of `args` and, behind them, a function that makes JSON.

    Args:
      size: how much there is to write: tokens, and their rivals.
    """
    if size < LONG:
        return write(*args, msgspec.json.encode)
    return await asyncio.to_thread(write, *args, encoded)


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
