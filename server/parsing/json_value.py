"""One JSON value that comes in pieces: is it valid so far, and where does it end."""

from __future__ import annotations

import json
import re

MAX_DEPTH = 128  # nested deeper, many readers of JSON fail
BLANKS = frozenset(" \t\n\r")

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = frozenset("0123456789")


def _number_steps() -> dict[str, dict[str, str]]:
    """What may follow in a number: state -> character -> state."""
    digits = {state: dict.fromkeys("0123456789", state) for state in ("int", "fraction", "exponent")}
    end = {"e": "e", "E": "e"}
    return {
        "-": {**dict.fromkeys("123456789", "int"), "0": "zero"},
        "zero": {".": ".", **end},
        "int": {**digits["int"], ".": ".", **end},
        ".": dict.fromkeys("0123456789", "fraction"),
        "fraction": {**digits["fraction"], **end},
        "e": {**dict.fromkeys("0123456789", "exponent"), "+": "e+", "-": "e+"},
        "e+": dict.fromkeys("0123456789", "exponent"),
        "exponent": digits["exponent"],
    }


_NUMBER = _number_steps()
_COMPLETE_NUMBERS = frozenset({"zero", "int", "fraction", "exponent"})


class JsonValue:
    """Reads a value, strictly but for one thing: control characters in strings, which models write, are escaped.

    Attributes:
      done: the value is complete.
      failed: what came next cannot follow.
    """

    def __init__(self) -> None:
        self.done = self.failed = False
        self._closers: list[str] = []  # of the open containers
        self._state = "value"
        self._in_key = False
        self._rest = ""  # of a literal
        self._hex_left = 0

    def feed(self, text: str, start: int = 0) -> tuple[int, str]:
        """Reads on. Returns where it stopped, at the end of the text or of what is valid, and the JSON it read."""
        i, begin, read = start, start, []
        while i < len(text) and not self.done and not self.failed:
            char = text[i]
            if self._state == "string":
                plain = _PLAIN.match(text, i)
                if plain is not None:
                    i = plain.end()
                    continue
                if char < " ":
                    read += [text[begin:i], json.dumps(char)[1:-1]]
                    i = begin = i + 1
                    continue
            i += self._step(char)
        read.append(text[begin:i])
        return i, "".join(read)

    def _step(self, char: str) -> bool:
        """Whether the character was read; one that ends a number is not part of it."""
        state = self._state
        if state == "string":
            self._state = "escape" if char == "\\" else self._state
            if char == '"':
                self._end_string()
        elif state == "escape":
            if char == "u":
                self._state, self._hex_left = "hex", 4
            else:
                return self._go("string", char in _ESCAPES)
        elif state == "hex":
            self._hex_left -= 1
            return self._go("hex" if self._hex_left else "string", char in _HEX)
        elif state == "literal":
            if char != self._rest[0]:
                return self._fail()
            self._rest = self._rest[1:]
            if not self._rest:
                self._end_value()
        elif state in _NUMBER:
            following = _NUMBER[state].get(char)
            if following is not None:
                self._state = following
            elif state in _COMPLETE_NUMBERS:
                self._end_value()
                return False
            else:
                return self._fail()
        else:
            return char in BLANKS or self._structure(char)
        return True

    def _structure(self, char: str) -> bool:
        """Reads a character between the scalars."""
        state = self._state
        if state in ("value", "first value") and not (state == "first value" and char == "]"):
            return self._begin(char)
        if state in ("first key", "key") and char == '"':
            self._in_key = True
            return self._go("string", True)
        if state == "colon":
            return self._go("value", char == ":")
        if state == "comma" and char == ",":
            return self._go("key" if self._closers[-1] == "}" else "value", True)
        if state in ("comma", "first key", "first value") and char == self._closers[-1]:
            self._closers.pop()
            self._end_value()
            return True
        return self._fail()

    def _begin(self, char: str) -> bool:
        if char in "{[":
            self._closers.append("}" if char == "{" else "]")
            return self._go("first key" if char == "{" else "first value", len(self._closers) <= MAX_DEPTH)
        if char == '"':
            return self._go("string", True)
        if char in _LITERALS:
            self._rest = _LITERALS[char][1:]
            return self._go("literal", True)
        if char == "-" or char in _DIGITS:
            return self._go("-" if char == "-" else "zero" if char == "0" else "int", True)
        return self._fail()

    def _end_string(self) -> None:
        if self._in_key:
            self._in_key, self._state = False, "colon"
        else:
            self._end_value()

    def _end_value(self) -> None:
        self._state = "comma"
        self.done = not self._closers

    def _go(self, state: str, allowed: bool) -> bool:
        self._state = state
        return True if allowed else self._fail()

    def _fail(self) -> bool:
        self.failed = True
        return False
