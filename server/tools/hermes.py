"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

from __future__ import annotations

from server.parsing.json_value import BLANKS
from server.parsing.scanner import Markers, State
from server.tools.call_scanner import CallScanner
from server.tools.calls import Call, JsonCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallScanner):
    """Calls between tags. Between a call and its closing tag, small models write a brace too many or another call."""

    MARKERS = (OPEN, CLOSE)
    _markers = Markers(OPEN, CLOSE)
    _is_open = False

    def _begin(self, text: str, i: int) -> int:
        at, marker = self._markers.find(text, i)
        self._say(text[i:at])
        if marker == OPEN:
            self._is_open = True
            self._raw.append(marker)
            self._start_call(JsonCall(self._num_calls))
        elif marker and not self._is_open:
            self._say(marker)
        elif marker:
            self._is_open = False
        return at + len(marker)

    def _after_call_of(self, call: Call) -> State:
        self._is_open = call.begun  # what is no call keeps its closing tag
        return self._inside if call.begun and call.done else self._begin

    def _inside(self, text: str, i: int) -> int:
        """After a call, before its closing tag."""
        if text[i] in BLANKS or text[i] == "}":
            self._raw.append(text[i])
            return i + 1
        if text[i] == "{":
            self._start_call(JsonCall(self._num_calls))
            return i
        at, marker = self._markers.find(text, i)
        if at == i and not marker:
            return i  # it may become one
        if at == i:
            self._raw.clear()
        else:
            self._give_up()
        self._state = self._begin
        return i

    def _end(self, rest: str) -> None:
        if self._state == self._inside and CLOSE.startswith(rest):
            self._raw.clear()
        super()._end(rest)
