"""Mistral: `[TOOL_CALLS]`, then an array of objects, or, of newer models, `name{...}` or `name[ARGS]{...}` a call."""

from __future__ import annotations

from server.parsing.json_value import BLANKS
from server.parsing.scanner import Markers, State
from server.tools.call_scanner import CallScanner
from server.tools.calls import Call, JsonCall, NamedCall

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_NAME = 256


class MistralParser(CallScanner):
    """Calls after a marker, in either form."""

    MARKERS = (CALLS, CALL_ID, ARGS)
    _markers = Markers(*MARKERS)
    _in_array = False
    _head: list[str]  # between the marker and the arguments
    _head_size = 0

    def _begin(self, text: str, i: int) -> int:
        at, marker = self._markers.find(text, i)
        self._say(text[i:at])
        if marker == CALLS:
            self._raw.append(marker)
            self._state = self._first
        elif marker:
            self._say(marker)
        return at + len(marker)

    def _first(self, text: str, i: int) -> int:
        """Behind the marker."""
        if text[i] in BLANKS:
            self._raw.append(text[i])
            return i + 1
        at, marker = self._markers.find(text, i)
        if at == i and not marker:
            return i  # it may become one
        if text[i] == "[" and not (marker and at == i):
            self._raw.append("[")
            self._in_array = True
            self._state = self._element
            return i + 1
        self._head, self._head_size = [], 0
        self._in_array = False
        if text[i] == "{":
            self._start_call(JsonCall(self._num_calls))
        else:
            self._state = self._named
        return i

    def _element(self, text: str, i: int) -> int:
        """In an array, before an object."""
        if text[i] in BLANKS:
            self._raw.append(text[i])
            return i + 1
        self._start_call(JsonCall(self._num_calls))
        return i

    def _comma(self, text: str, i: int) -> int:
        """In an array, after an object."""
        char = text[i]
        if char in BLANKS:
            self._raw.append(char)
            return i + 1
        if char not in ",]":
            self._give_up()
            self._state = self._begin
            return i
        self._raw.append(char)
        self._state = self._element if char == "," else self._begin
        if char == "]":
            self._raw.clear()
        return i + 1

    def _named(self, text: str, i: int) -> int:
        """A name, and maybe an id, before the arguments."""
        at, marker = self._markers.find(text, i)
        brace = text.find("{", i, at)
        end = brace if brace >= 0 else at
        self._head.append(text[i:end])
        self._head_size += end - i
        self._raw.append(text[i:end])
        if brace < 0 and marker in (CALL_ID, ARGS):
            self._head.append(marker)
            self._raw.append(marker)
            return end + len(marker)
        if brace >= 0 or marker or self._head_size > MAX_NAME:
            name = "".join(self._head).partition(CALL_ID)[0].partition(ARGS)[0].strip()
            if brace >= 0 and _is_name(name):
                self._start_call(NamedCall(self._num_calls, name))
            else:
                self._give_up()
                self._state = self._begin
        return end

    def _after_call_of(self, call: Call) -> State:
        return self._comma if self._in_array and call.done else self._begin

    def _end(self, rest: str) -> None:
        if self._state == self._comma:
            self._raw.clear()
        super()._end(rest)


def _is_name(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME and all(char.isalnum() or char in "_-." for char in text)
