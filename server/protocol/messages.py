"""The messages of a conversation, as the schema tells of them. They are checked where they are rendered."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

MAX_MESSAGES = 4096  # a template takes long with more

_TEXT = {"type": "string"}


def _part(kind: str) -> dict[str, Any]:
    properties = {"type": {"type": "string", "enum": [kind]}, kind: _TEXT}
    return {"type": "object", "properties": properties, "required": ["type", kind]}


def _content(*kinds: str) -> dict[str, Any]:
    """Text, or parts of these kinds."""
    parts = [_part(kind) for kind in kinds]
    items = parts[0] if len(parts) == 1 else {"anyOf": parts}
    return {"anyOf": [_TEXT, {"type": "array", "items": items}]}


_FUNCTION = {
    "type": "object",
    "properties": {"name": _TEXT, "arguments": {"type": "string", "description": "JSON."}},
    "required": ["name", "arguments"],
}
_CALL = {
    "type": "object",
    "properties": {"id": _TEXT, "type": {"type": "string", "enum": ["function"]}, "function": _FUNCTION},
    "required": ["id", "type", "function"],
}


def _message(*roles: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    fields = {"role": {"type": "string", "enum": list(roles)}, "name": _TEXT, **properties}
    return {"type": "object", "properties": fields, "required": ["role", *required]}


MESSAGE_SCHEMA = {
    "anyOf": [
        _message("system", "developer", "user", required=("content",), content=_content("text")),
        _message(
            "assistant",
            content={"anyOf": [*_content("text", "refusal")["anyOf"], {"type": "null"}]},
            refusal={"type": ["string", "null"]},
            reasoning={"type": ["string", "null"], "description": "Its thoughts, where the chat template knows any."},
            tool_calls={"type": "array", "items": _CALL},
        ),
        _message("tool", required=("content",), content=_content("text"), tool_call_id=_TEXT),
    ]
}


Messages = Annotated[
    list[Any],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    WithJsonSchema({"type": "array", "items": MESSAGE_SCHEMA, "minItems": 1, "maxItems": MAX_MESSAGES}),
]
