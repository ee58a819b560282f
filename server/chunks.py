"""The events of a streamed answer, from the outputs that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from jaxpaged.engine.output import RequestOutput
from server.failures import Failures
from server.protocol.generation import StreamOptions
from server.usage import Usage

_DONE = b"data: [DONE]\n\n"


class Choices(Protocol):
    """What is said of the outputs of one prompt."""

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the model's thoughts so far; None: thoughts are not told apart."""
        ...

    def pieces(self, output: RequestOutput) -> Iterable[dict[str, Any]]:
        """What a delta adds to the choices, a piece a chunk."""
        ...

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What the first chunk says of the prompt, beside the choices."""
        ...


class Chunks:
    """Those of one answer: chunks that differ in their choices, one with the usage if wanted, and the end."""

    def __init__(
        self,
        head: Mapping[str, Any],
        options: StreamOptions | None,
        choices: Sequence[Choices],
        failures: Failures,
    ):
        """
        Args:
          head: the fields that all chunks begin with.
          choices: of each prompt.
        """
        self._head = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        self._choices, self._failures, self._usage = choices, failures, Usage()
        self._with_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._counts = self._with_usage or self._continuous
        self._begun = False

    def count(self, index: int, output: RequestOutput) -> None:
        """Takes down what a delta of the prompt with this index tells of the answer as a whole.

        Raises:
          APIError: nothing will come of it.
        """
        self._failures.check((output,))
        if self._counts:
            self._usage.add(index, output)

    def write(self, index: int, output: RequestOutput, encode: Callable[[Any], bytes] = msgspec.json.encode) -> bytes:
        """A chunk for each piece of a delta, which may be none. Deltas of other prompts may be written meanwhile.

        Args:
          encode: makes JSON.
        """
        choices = self._choices[index]
        pieces = [encode(piece) for piece in choices.pieces(output)]
        more = self._usage_field(choices) if self._counts else {}
        end = _end(more)
        chunks = [self._head + piece + end for piece in pieces]
        if chunks and not self._begun:
            self._begun = True
            chunks[0] = self._head + pieces[0] + _end({**more, **choices.of_prompt(output)})
        return b"".join(chunks)

    def end(self) -> bytes:
        """What comes when all has been written."""
        return self._head + _end({"usage": self._usage.to_json()}) + _DONE if self._with_usage else _DONE

    def _usage_field(self, choices: Choices) -> dict[str, Any]:
        self._usage.reasoning_tokens = choices.reasoning_tokens
        return {"usage": self._usage.to_json() if self._continuous else None}


def error_event(body: Mapping[str, Any]) -> bytes:
    """What ends an answer that has begun, in place of the rest."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n" + _DONE


def _end(more: dict[str, Any]) -> bytes:
    """The end of a chunk; `more` are fields behind the choices."""
    return b"]," + msgspec.json.encode(more)[1:] + b"\n\n" if more else b"]}\n\n"
