"""Text that comes in pieces, read by states: what the parsers of all formats share."""

from __future__ import annotations

import re
from collections.abc import Callable

from server.parsing.deltas import Delta

State = Callable[[str, int], int]


class Markers:
    """Finds the first of several texts."""

    def __init__(self, *texts: str):
        self._texts = texts
        self._any = re.compile("|".join(map(re.escape, texts)))  # literals only: one pass
        self._longest = max(map(len, texts))
        self._firsts = tuple({text[0] for text in texts})

    def find(self, text: str, start: int) -> tuple[int, str]:
        """`(index, marker)` of the first marker. If there is none: `(index, "")` of what may be the front of one at the
        end, else `(len(text), "")`."""
        match = self._any.search(text, start)
        if match is not None:
            return match.start(), match[0]
        for i in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[i] in self._firsts and any(marker.startswith(text[i:]) for marker in self._texts):
                return i, ""
        return len(text), ""


class Scanner:
    """Runs states over the text. A state reads from a place on and returns where it stopped, with or without another
    state in its place; if it read nothing and stays, it waits for more text."""

    def __init__(self) -> None:
        self._state: State = self._begin
        self._unread = ""  # short: the front of a marker
        self._deltas: list[Delta] = []

    def feed(self, text: str) -> list[Delta]:
        """As `Parser.feed`."""
        text = self._unread + text
        i, before = 0, None
        while i < len(text) and before != (i, self._state):
            before = i, self._state
            i = self._state(text, i)
        self._unread = text[i:]
        return self._taken()

    def finish(self) -> list[Delta]:
        """As `Parser.finish`."""
        rest, self._unread = self._unread, ""
        self._end(rest)
        return self._taken()

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _begin(self, text: str, i: int) -> int:
        """The first state."""
        raise NotImplementedError

    def _end(self, rest: str) -> None:
        """Says what is left to say. Args: rest: text that no state has read."""
        raise NotImplementedError
