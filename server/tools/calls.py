"""Calls written in JSON that come in pieces: an object with a name and arguments, or the arguments alone."""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any, Protocol

from server.parsing.deltas import CallArguments, CallBegins, Delta
from server.parsing.json_value import BLANKS, JsonValue

_ARGUMENTS = ("arguments", "parameters")
_HARMLESS = ("type", "id")  # keys that some models add


class Call(Protocol):
    """Reads one call.

    Attributes:
      begun: its beginning has been told, so it is a call whatever follows.
      done: it is complete.
      failed: what came next cannot follow.
    """

    begun: bool
    done: bool
    failed: bool

    def feed(self, text: str, start: int, deltas: list[Delta]) -> int:
        """Reads on, adds what it tells, and returns where it stopped."""
        ...


class NamedCall:
    """The arguments of a call whose name is known: a JSON object."""

    def __init__(self, index: int, name: str):
        self.begun = self.done = self.failed = False
        self._index, self._name = index, name
        self._value = JsonValue()

    def feed(self, text: str, start: int, deltas: list[Delta]) -> int:
        i = start
        if not self.begun:
            while i < len(text) and text[i] in BLANKS:
                i += 1
            if i == len(text):
                return i
            if text[i] != "{":
                self.failed = True
                return i
            self.begun = True
            deltas.append(CallBegins(self._index, self._name))
        i, piece = self._value.feed(text, i)
        if piece:
            deltas.append(CallArguments(self._index, piece))
        self.done, self.failed = self._value.done, self._value.failed
        return i


class JsonCall:
    """An object with "name" and "arguments" (or "parameters"), in any order.

    It begins with the first piece of its arguments once its name is known. Arguments may also be JSON inside a string,
    and null or missing ones are an empty object.
    """

    def __init__(self, index: int, names: Set[str] | None = None):
        """
        Args:
          index: its number.
          names: those that there are, where nothing else tells a call from other JSON: then it has no other keys.
        """
        self.begun = self.done = self.failed = False
        self._index, self._names = index, names
        self._state = "open"
        self._value: JsonValue | None = None
        self._read: list[str] = []  # of a value that is looked at when it is complete
        self._streams = False
        self._key = ""
        self._name: str | None = None
        self._early: list[str] | None = None  # arguments that came before the name

    def feed(self, text: str, start: int, deltas: list[Delta]) -> int:
        i = start
        while i < len(text) and not self.done and not self.failed:
            if self._value is not None:
                i = self._read_value(self._value, text, i, deltas)
            elif text[i] in BLANKS:
                i += 1
            else:
                i += self._step(text[i], deltas)
        return i

    def _step(self, char: str, deltas: list[Delta]) -> bool:
        """Reads a character between the values, or starts one with it: whether it was read."""
        state = self._state
        if state in ("first key", "key") and char == '"':
            self._state, self._value = "colon", JsonValue()
            return False
        if state == "value":
            self._begin_value(char)
            return False
        if char == "}" and state in ("first key", "comma"):
            self._close(deltas)
            return not self.failed
        expected, following = {
            "open": ("{", "first key"), "colon": (":", "value"), "comma": (",", "key"),
        }.get(state, ("", ""))  # fmt: skip
        self.failed = char != expected
        self._state = following
        return not self.failed

    def _begin_value(self, char: str) -> None:
        if self._key in _ARGUMENTS:
            self._streams = char == "{"
            self.failed = char not in '{"n' or self._early is not None
        elif self._key == "name":
            self.failed = char != '"' or self._name is not None
        else:
            self.failed = self._names is not None and self._key not in _HARMLESS and not self.begun
        self._state, self._value = "comma", JsonValue()

    def _read_value(self, value: JsonValue, text: str, start: int, deltas: list[Delta]) -> int:
        i, piece = value.feed(text, start)
        if self._streams:
            self._add_arguments(piece, deltas)
        else:
            self._read.append(piece)
        self.failed = value.failed
        if value.done:
            read, self._read, self._value = "".join(self._read), [], None
            if self._streams:
                self._streams = False
            else:
                self._use(read, deltas)
        return i

    def _use(self, read: str, deltas: list[Delta]) -> None:
        """Takes in a key, or a value that is no streamed object. What tells nothing may be no value for Python."""
        if self._state == "colon":
            self._key = json.loads(read)
        elif self._key == "name":
            self._name = name = json.loads(read)
            self.failed = not _is_text(name) or (self._names is not None and name not in self._names)
            if self._early:
                early, self._early = "".join(self._early), []
                self._add_arguments(early, deltas)
        elif self._key in _ARGUMENTS:
            text = json.loads(read) or "{}"  # null, and of tools that take none ""
            self.failed = not _is_object(text)
            if not self.failed:
                self._add_arguments(_with_escapes(text.strip()), deltas)

    def _add_arguments(self, piece: str, deltas: list[Delta]) -> None:
        self._early = self._early or []
        if self._name is None or self.failed:
            self._early.append(piece)
            return
        if not self.begun:
            self.begun = True
            deltas.append(CallBegins(self._index, self._name))
        if piece:
            deltas.append(CallArguments(self._index, piece))

    def _close(self, deltas: list[Delta]) -> None:
        if self._name is None:
            self.failed = True
            return
        if not self.begun:
            self._add_arguments("{}", deltas)
        self.done = True


def _is_text(value: Any) -> bool:
    """Whether it is a text that UTF-8 can hold: an escape may stand for half of a character."""
    return isinstance(value, str) and value != "" and _with_escapes(value) == value


def _with_escapes(text: str) -> str:
    """Halves of characters as JSON writes them."""
    return text.encode("utf-8", "backslashreplace").decode()


def _is_object(text: Any) -> bool:
    try:
        return isinstance(text, str) and isinstance(json.loads(text, parse_constant=_no_constant), dict)
    except (ValueError, RecursionError):
        return False


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
