"""Checks of single parameters: each is called with a name and a value, and refuses the value by that name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxpaged.errors import InvalidRequestError

Check = Callable[[str, Any], None]


def real(low: float, high: float) -> Check:
    """A number from `low` to `high`. `low <= x <= high` is false for NaN; a bool is a number to Python only."""

    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise InvalidRequestError(f"{name}={value!r:.80} must be a number from {low:g} to {high:g}", param=name)

    return check


def integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidRequestError(f"{name}={value!r:.80} must be an integer from {low} to {high}", param=name)

    return check


def boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name}={value!r:.80} is not a bool", param=name)


def one_of(*allowed: Any) -> Check:
    def check(name: str, value: Any) -> None:
        if not any(value is a or (isinstance(a, str) and value == a) for a in allowed):
            raise InvalidRequestError(f"{name}={value!r:.80} must be one of {allowed}", param=name)

    return check


def list_of(most: int, item: Check, *, least: int = 0) -> Check:
    def check(name: str, value: Any) -> None:
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise InvalidRequestError(f"{name}={value!r:.80} is not a list", param=name)
        if not least <= len(value) <= most:
            limit = f"at least {least}" if len(value) < least else f"at most {most}"
            raise InvalidRequestError(f"{name} has {len(value)} entries, {limit}", param=name)
        for entry in value:
            item(name, entry)

    return check


def integers(most: int, low: int, high: int, *, least: int = 0) -> Check:
    """A list of integers; there may be a vocabulary of them."""
    one_by_one = list_of(most, integer(low, high), least=least)

    def check(name: str, value: Any) -> None:
        all_integers = isinstance(value, list) and least <= len(value) <= most and set(map(type, value)) == {int}
        if all_integers and low <= min(value) and max(value) <= high:
            return  # as good as always, and many times as fast
        one_by_one(name, value)

    return check


def text(most: int) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or not 0 < len(value) <= most:
            start = value[:80] if isinstance(value, str) else value  # the whole may be megabytes
            raise InvalidRequestError(f"{name} holds {start!r:.80}, not a text of 1 to {most} characters", param=name)

    return check


def instance(kind: type) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise InvalidRequestError(f"{name}={value!r:.80} is not a {kind.__name__}", param=name)

    return check
