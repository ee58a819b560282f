"""Text that comes in pieces, read by states: what the parsers of all formats share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from server.chat.deltas import Content, Delta
from server.tools.calls import Call

State = Callable[[str, int], int]


class Markers:
    """Finds the first of several texts."""

    def __init__(self, *texts: str):
        self._texts = texts
        self._any = re.compile("|".join(map(re.escape, texts)))  # literals only: one pass
        self._longest = max(map(len, texts))
        self._firsts = tuple({text[0] for text in texts})

    def find(self, text: str, start: int) -> tuple[int, str]:
        """Where the first one is and which. None is there: where the front of one may be, or the text's end; and ""."""
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


class CallScanner(Scanner):
    """Content with calls in it. Blanks around calls belong to neither, and what began as a call but is none is content.

    Args:
      hidden: markers that are control tokens of the model: they are never content.
    """

    MARKERS: tuple[str, ...] = ()  # texts that may be control tokens

    def __init__(self, hidden: Sequence[str] = ()):
        super().__init__()
        self._hidden = hidden
        self._call: Call | None = None
        self._num_calls = 0
        self._raw: list[str] = []  # of a call that has not begun
        self._blanks: list[str] = []  # that have not been told
        self._after_call = False

    def _say(self, text: str) -> None:
        """Adds content; blanks at its end wait for what follows them."""
        for marker in self._hidden:
            text = text.replace(marker, "")
        said = text.rstrip()
        if said:
            self._deltas.append(Content("".join(self._blanks) + said))
            self._blanks.clear()
            self._after_call = False
        if len(said) < len(text):
            self._blanks.append(text[len(said) :])

    def _start_call(self, call: Call) -> None:
        self._call, self._state = call, self._read_call

    def _read_call(self, text: str, i: int) -> int:
        call = self._call
        assert call is not None
        was_begun = call.begun
        end = call.feed(text, i, self._deltas)
        if not call.begun:
            self._raw.append(text[i:end])
        elif not was_begun:
            self._num_calls += 1
            self._raw.clear()
        if call.done or call.failed:
            self._call = None
            self._state = self._after_call_of(call)
            if call.begun:
                self._blanks.clear()
                self._after_call = True
            else:
                self._give_up()
        return end

    def _after_call_of(self, call: Call) -> State:
        """The state after a call that is done or has failed."""
        raise NotImplementedError

    def _give_up(self) -> None:
        """What was read is no call."""
        raw, self._raw = "".join(self._raw), []
        self._say(raw)

    def _end(self, rest: str) -> None:
        self._raw.append(rest)
        if self._call is None or not self._call.begun:
            self._give_up()
        if not self._after_call and self._blanks:
            self._deltas.append(Content("".join(self._blanks)))
