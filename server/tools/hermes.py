"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

from __future__ import annotations

from server.tools.calls import Call, JsonCall
from server.tools.scanner import CallScanner, Markers, State

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallScanner):
    """Calls between tags."""

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
        return self._begin
