"""The text of a chat answer taken apart: thoughts, content and calls of tools, whole or as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from jaxpaged.errors import UnsupportedError
from server.chat.reasoning import ReasoningParser
from server.parsing.deltas import CallArguments, CallBegins, Content, Delta, Parser, Reasoning

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer


class ChatParser:
    """Reads one answer. What follows the thoughts alone may hold calls."""

    def __init__(self, reasoning: ReasoningParser | None, calls: Parser | None, *, max_calls: int | None = None):
        """
        Args:
          reasoning: None: there are no thoughts.
          calls: None: there are no calls.
          max_calls: later ones are dropped; None: as many as come.
        """
        self.reasoning = reasoning
        self._calls, self._max_calls = calls, max_calls
        self.num_calls = 0

    def feed(self, text: str) -> list[Delta]:
        """As `Parser.feed`, deltas of a kind joined."""
        deltas = self._parsed(self.reasoning.feed(text)) if self.reasoning else self._called(text)
        return self._told(deltas)

    def finish(self) -> list[Delta]:
        """As `Parser.finish`."""
        deltas = self._parsed(self.reasoning.finish()) if self.reasoning else []
        if self._calls is not None:
            deltas += self._calls.finish()
        return self._told(deltas)

    def _parsed(self, deltas: list[Delta]) -> list[Delta]:
        """Looks for calls in the content."""
        if self._calls is None:
            return deltas
        parsed: list[Delta] = []
        for delta in deltas:
            parsed += self._called(delta.text) if isinstance(delta, Content) else [delta]
        return parsed

    def _called(self, text: str) -> list[Delta]:
        return self._calls.feed(text) if self._calls is not None else [Content(text)]

    def _told(self, deltas: list[Delta]) -> list[Delta]:
        told: list[Delta] = []
        for delta in joined(deltas):
            if isinstance(delta, CallBegins | CallArguments):
                if self._max_calls is not None and delta.index >= self._max_calls:
                    continue
                self.num_calls = delta.index + 1
            told.append(delta)
        return told


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Adjacent texts of a kind as one; empty ones left out."""
    result: list[Delta] = []
    texts: list[str] = []
    last: Delta | None = None

    def close() -> None:
        if last is not None and not isinstance(last, CallBegins) and any(texts):
            result.append(last._replace(text="".join(texts)))
        texts.clear()

    for delta in deltas:
        if isinstance(delta, CallBegins):
            close()
            result.append(delta)
        else:
            if last is None or type(delta) is not type(last) or getattr(delta, "index", 0) != getattr(last, "index", 0):
                close()
            texts.append(delta.text)
        last = delta
    close()
    return result


class MadeCall(NamedTuple):
    """A call that was made, its arguments as far as they came."""

    name: str
    arguments: str


@dataclass
class ParsedMessage:
    """All that an answer says."""

    reasoning: str = ""
    content: str = ""
    calls: list[MadeCall] = field(default_factory=list)


def parsed_message(deltas: Sequence[Delta]) -> ParsedMessage:
    """What deltas add up to."""
    reasoning, content, names, arguments = [], [], [], []
    for delta in deltas:
        match delta:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case CallBegins(_, name):
                names.append(name)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    calls = [MadeCall(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True)]
    return ParsedMessage("".join(reasoning), "".join(content), calls)


class ReasoningTokens:
    """Counts the tokens of an answer that belong to its thoughts, marks included."""

    def __init__(self, tokenizer: Tokenizer, parser: ReasoningParser):
        self._tokenizer, self._parser = tokenizer, parser
        self._num_bytes = 0  # of the text of the tokens so far
        self._count = 0

    @property
    def count(self) -> int:
        """How many; they are none if what came first has turned out to be content."""
        return self._count if self._parser.thinking or self._parser.num_bytes else 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes in tokens whose text has been parsed."""
        parser = self._parser
        for token_id in token_ids:
            if not parser.thinking and self._num_bytes >= parser.num_bytes:
                return
            self._count += 1
            try:
                self._num_bytes += len(self._tokenizer.token_bytes(token_id))
            except UnsupportedError:  # tokens have no bytes of their own: all that come with the thoughts count
                self._num_bytes = 0 if parser.thinking else parser.num_bytes
