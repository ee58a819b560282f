"""One or several prompts, as text or token ids: the field that /v1/completions and /v1/embeddings begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from server.errors import shown
from server.protocol.fields import invalid

Prompts = list[str] | list[list[int]]

_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _IDS_SCHEMA,
        {"type": "array", "items": _IDS_SCHEMA},
    ]
}


def prompts(name: str, most: int) -> Callable[[Any], Prompts]:
    """What makes a list of prompts, all texts or all token ids, from any of the four forms.

    Args:
      name: of the field.
      most: how many there may be.
    """

    def check(value: Any) -> Prompts:
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            what = "empty" if value in ([], None) else f"{type(value).__name__} {shown(value)}"
            raise invalid(name, f"{name} must be text, token ids, or a list of these, not {what}")
        kinds = set(map(type, value))
        if not kinds & {str, list}:
            return [_token_ids(value, name, name)]
        if len(value) > most:
            raise invalid(name, f"{name} holds {len(value)} prompts, at most {most}")
        if kinds == {str}:
            return value
        for i, item in enumerate(value):
            if not isinstance(item, list):
                raise invalid(name, f"{name}[{i}]={shown(item)} is not a list of token ids as others are")
        return [_token_ids(item, name, f"{name}[{i}]") for i, item in enumerate(value)]

    return check


def _token_ids(value: list[Any], name: str, where: str) -> list[int]:
    if not value:
        raise invalid(name, f"{where} is empty: it needs at least one token")
    if set(map(type, value)) != {int}:
        i, item = next((i, item) for i, item in enumerate(value) if type(item) is not int)
        raise invalid(name, f"{where}[{i}]={shown(item)} is not a token id")
    return value
