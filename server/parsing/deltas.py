"""What the text of an answer adds to a chat message: reasoning, content, calls of tools."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Reasoning(NamedTuple):
    """Thoughts of the model."""

    text: str


class Content(NamedTuple):
    """Text for the user."""

    text: str


class CallBegins(NamedTuple):
    """A call of a tool; calls are numbered from 0."""

    index: int
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments: the pieces join to a JSON object."""

    index: int
    text: str


Delta = Reasoning | Content | CallBegins | CallArguments


class Parser(Protocol):
    """Takes the text of one answer apart as it comes.

    However the text is cut, the joined deltas are the same. Nothing raises, and no text is lost: what is not markup of
    the format is content.
    """

    def feed(self, text: str) -> list[Delta]:
        """Reads more text. Text that may yet turn out to be markup is held back."""
        ...

    def finish(self) -> list[Delta]:
        """Ends the text: gives what was held back."""
        ...
