"""Calls as plain JSON: the whole answer is an object or an array of objects with "name" and "arguments".

Nothing marks them, so only the names of the request's tools make them calls: all other JSON is content.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from server.parsing.json_value import BLANKS
from server.parsing.scanner import Markers, State
from server.tools.call_scanner import CallScanner
from server.tools.calls import Call, JsonCall


class PlainJsonParser(CallScanner):
    """Calls that begin the answer.

    Args:
      names: of the tools.
    """

    _separators = ","

    def __init__(self, names: Set[str], hidden: Sequence[str] = ()):
        super().__init__(hidden)
        self._names = names
        self._in_array = False

    def _begin(self, text: str, i: int) -> int:
        """Before the first call, or behind the bracket of an array of them."""
        if text[i] in BLANKS or (text[i] == "[" and not self._in_array):
            self._in_array |= text[i] == "["
            self._raw.append(text[i])
            return i + 1
        if text[i] == "{":
            self._start_call(JsonCall(self._num_calls, self._names))
        else:
            self._give_up()
            self._state = self._content
        return i

    def _between(self, text: str, i: int) -> int:
        """After a call: another one, or the end."""
        char = text[i]
        if char in BLANKS or char in self._separators or (char == "]" and self._in_array):
            self._in_array &= char != "]"
            self._raw.append(char)
            return i + 1
        if char == "{":
            self._start_call(JsonCall(self._num_calls, self._names))
        else:
            self._give_up()
            self._state = self._content
        return i

    def _content(self, text: str, i: int) -> int:
        self._say(text[i:])
        return len(text)

    def _after_call_of(self, call: Call) -> State:
        return self._between if call.done else self._content

    def _end(self, rest: str) -> None:
        if self._state == self._between:
            self._raw.clear()  # separators
        super()._end(rest)


class Llama3JsonParser(PlainJsonParser):
    """Llama 3: `{"name": ..., "parameters": {...}}`, maybe after `<|python_tag|>`, several separated by `;`."""

    TAG = "<|python_tag|>"
    MARKERS = (TAG,)
    _separators = ",;"
    _markers = Markers(TAG)

    def _begin(self, text: str, i: int) -> int:
        # The tag is looked for in front of everything else.
        return self._content(text, i) if text[i] == "<" else super()._begin(text, i)

    def _content(self, text: str, i: int) -> int:
        at, marker = self._markers.find(text, i)
        if at > i:
            self._give_up()
            self._say(text[i:at])
            self._state = self._content
        if marker:
            self._give_up()
            self._raw.append(marker)
            self._in_array = False
            self._state = self._begin
        return at + len(marker)
