"""A Python literal that comes in pieces, as JSON."""

from __future__ import annotations

import json
import math
import re

from server.parsing.json_value import BLANKS, MAX_DEPTH

_MAX_WORD = 400
_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_WORD = re.compile(r"[\w.+-]+", re.ASCII)
_NAMED = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_INTEGER = re.compile(r"[+-]?(0|[1-9](_?[0-9])*|0[xX][0-9a-fA-F]+)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "\\": "\\",
            "'": "'", '"': '"', "0": "\0"}  # fmt: skip
_CODES = {"x": 2, "u": 4, "U": 8}  # hexadecimal digits
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


class PythonValue:
    """Reads a text, a number, a constant, a list, a tuple or a dict. Its end is the character that follows it.

    Attributes:
      done: the value is complete.
      failed: what came next cannot follow.
    """

    def __init__(self) -> None:
        self.done = self.failed = False
        self._state = "value"
        self._closers: list[str] = []
        self._quote = ""
        self._word = ""
        self._code, self._code_length = "", 0
        self._in_key = False
        self._comma = ""  # JSON allows none before a closing bracket

    def feed(self, text: str, start: int) -> tuple[int, str]:
        """Reads on. Returns where it stopped, at the end of the text or of what is valid, and the JSON of it."""
        i, written = start, []
        while i < len(text) and not self.done and not self.failed:
            match = self._run(text, i)
            if match is None:
                i += self._step(text[i], written)
            elif self._state == "string":
                written.append(_inside(match[0]))
                i = match.end()
            else:
                self._word += match[0][:_MAX_WORD]
                self.failed = len(self._word) >= _MAX_WORD
                i = match.end()
        return i, "".join(written)

    def _run(self, text: str, i: int) -> re.Match[str] | None:
        """Several characters of a string or a word at once."""
        if self._state == "string":
            return _PLAIN[self._quote].match(text, i)
        return _WORD.match(text, i) if self._state == "word" else None

    def _step(self, char: str, written: list[str]) -> bool:
        """Whether the character was read; one that ends a word is not part of it."""
        state = self._state
        if state == "string":
            self._state = "escape" if char == "\\" else state
            if char == self._quote:
                written.append('"')
                self._end_string()
        elif state == "escape":
            self._escape(char, written)
        elif state == "code":
            self._add_code(char, written)
        elif state == "word":
            json_text = _word_json(self._word)
            self.failed = json_text is None
            written.append(json_text or "")
            self._end_value()
            return False
        elif char not in BLANKS:
            return self._structure(char, written)
        return True

    def _structure(self, char: str, written: list[str]) -> bool:
        closes = bool(self._closers) and char == self._closers[-1]
        if self._state == "colon":
            self.failed = char != ":"
            self._state = "value"
            written.append(": ")
        elif closes and self._state in ("comma", "item", "key"):
            self._comma = ""
            self._closers.pop()
            written.append("}" if char == "}" else "]")
            self._end_value()
        elif self._state == "comma":
            self.failed = char != ","
            self._comma, self._state = ", ", "key" if self._closers[-1] == "}" else "item"
        else:
            return self._begin(char, written)
        return True

    def _begin(self, char: str, written: list[str]) -> bool:
        """A value or a key."""
        self._in_key = self._state == "key"
        written.append(self._comma)
        self._comma = ""
        if char in "'\"":
            self._state, self._quote = "string", char
            written.append('"')
        elif char in _CLOSERS and not self._in_key:
            self._closers.append(_CLOSERS[char])
            self._state = "key" if char == "{" else "item"
            written.append("{" if char == "{" else "[")
            self.failed = len(self._closers) > MAX_DEPTH
        else:
            self._state, self._word = "word", ""
            self.failed = self._in_key or not _WORD.match(char)
            return False
        return True

    def _escape(self, char: str, written: list[str]) -> None:
        self._state = "string"
        if char in _CODES:
            self._state, self._code, self._code_length = "code", "", _CODES[char]
        else:
            written.append(_inside(_ESCAPES.get(char, "\\" + char)))

    def _add_code(self, char: str, written: list[str]) -> None:
        self._code += char
        self.failed = char not in "0123456789abcdefABCDEF"
        if not self.failed and len(self._code) == self._code_length:
            code = int(self._code, 16)
            self.failed = code > 0x10FFFF
            if not self.failed:
                written.append(json.dumps(chr(code))[1:-1])
                self._state = "string"

    def _end_string(self) -> None:
        if self._in_key:
            self._in_key, self._state = False, "colon"
        else:
            self._end_value()

    def _end_value(self) -> None:
        self._state = "comma"
        self.done = not self._closers and not self.failed


def _inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _word_json(word: str) -> str | None:
    """JSON of a constant or a number; None if it is neither."""
    if word in _NAMED:
        return _NAMED[word]
    if _INTEGER.fullmatch(word):
        return str(int(word, 0))
    try:
        number = float(word) if word[-1] in "0123456789." and word[-1:].isascii() else math.nan
    except ValueError:
        return None
    return json.dumps(number) if math.isfinite(number) else None
