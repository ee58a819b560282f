"""Llama 3.2 and 4: `[get_weather(city="Paris", days=3), get_time()]`, maybe between `<|python_start|>` and `_end|>`.

Nothing else marks such a list, so only the names of the request's tools make it one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set

from server.parsing.deltas import CallArguments, CallBegins, Delta
from server.parsing.json_value import BLANKS
from server.parsing.python_value import PythonValue
from server.parsing.scanner import Markers, State
from server.tools.call_scanner import CallScanner
from server.tools.calls import Call

START, END = "<|python_start|>", "<|python_end|>"
MAX_NAME = 256


class PythonCall:
    """What is between the parentheses of a call: keywords with values."""

    def __init__(self, index: int, name: str):
        self.begun = self.done = self.failed = False
        self._index, self._name = index, name
        self._state = "keyword or end"
        self._keyword: list[str] = []
        self._value: PythonValue | None = None
        self._before = "{"  # what is to be written before the next keyword

    def feed(self, text: str, start: int, deltas: list[Delta]) -> int:
        """As `Call.feed`."""
        i, written = start, []
        while i < len(text) and not self.done and not self.failed:
            if self._value is None:
                i += self._step(text[i], written)
                continue
            i, piece = self._value.feed(text, i)
            written.append(piece)
            self.failed = self._value.failed
            if self._value.done:
                self._value = None
        if any(written):
            if not self.begun:
                self.begun = True
                deltas.append(CallBegins(self._index, self._name))
            deltas.append(CallArguments(self._index, "".join(written)))
        return i

    def _step(self, char: str, written: list[str]) -> bool:
        state = self._state
        if state == "=":
            self._state, self._value = "comma", PythonValue()
            written.append(f"{self._before}{json.dumps(''.join(self._keyword))}: ")
            self._before = ", "
            return False
        if char in BLANKS:
            self._state = "after keyword" if state == "keyword" and self._keyword else state
        elif char == ")" and state != "after keyword" and not (state == "keyword" and self._keyword):
            written.append("{}" if self._before == "{" else "}")
            self.done = True
        elif char == "=" and state in ("keyword", "after keyword"):
            self._state = "="
        elif state == "comma":
            self.failed = char != ","
            self._state, self._keyword = "keyword", []
        elif state != "after keyword" and (char.isalnum() or char == "_") and len(self._keyword) < MAX_NAME:
            self._state = "keyword"
            self._keyword.append(char)
        else:
            self.failed = True
        return not self.failed


class PythonicParser(CallScanner):
    """A list of calls that begins the answer, or that follows a start marker.

    Args:
      names: of the tools.
    """

    MARKERS = (START, END)
    _markers = Markers(START, END)
    _name: list[str]

    def __init__(self, names: Set[str], hidden: Sequence[str] = ()):
        super().__init__(hidden)
        self._names = names

    def _begin(self, text: str, i: int) -> int:
        """Before the list."""
        if text[i] == "<":
            return self._content(text, i)
        self._raw.append(text[i])
        if text[i] == "[":
            self._name, self._state = [], self._read_name
        elif text[i] not in BLANKS:
            self._give_up()
            self._state = self._content
        return i + 1

    def _read_name(self, text: str, i: int) -> int:
        char = text[i]
        if char == "(" and "".join(self._name) in self._names:
            self._raw.append(char)
            self._start_call(PythonCall(self._num_calls, "".join(self._name)))
            return i + 1
        if (char.isalnum() or char in "_-.") and len(self._name) < MAX_NAME:
            self._name.append(char)
        elif char not in BLANKS or self._name:
            self._give_up()
            self._state = self._content
            return i
        self._raw.append(char)
        return i + 1

    def _between(self, text: str, i: int) -> int:
        """After a call."""
        char = text[i]
        if char not in BLANKS and char not in ",]":
            self._give_up()
            self._state = self._content
            return i
        self._raw.append(char)
        if char == ",":
            self._name, self._state = [], self._read_name
        elif char == "]":
            self._raw.clear()
            self._state = self._content
        return i + 1

    def _content(self, text: str, i: int) -> int:
        at, marker = self._markers.find(text, i)
        if at > i:
            self._give_up()
            self._say(text[i:at])
            self._state = self._content
        if marker == START:
            self._give_up()
            self._raw.append(marker)
            self._state = self._begin
        elif marker and not self._after_call:
            self._give_up()
            self._say(marker)
            self._state = self._content
        return at + len(marker)

    def _after_call_of(self, call: Call) -> State:
        return self._between if call.done else self._content

    def _end(self, rest: str) -> None:
        if self._state == self._between:
            self._raw.clear()
        super()._end(rest)
