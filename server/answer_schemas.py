"""What answers hold, for /openapi.json. Other keys may come along: those that a request asked for."""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_COUNT = {"type": "integer", "minimum": 0}
_ANYTHING: dict[str, Any] = {}


def _object(**properties: Any) -> dict[str, Any]:
    """An object that has all of these."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _optional(schema: dict[str, Any], **properties: Any) -> dict[str, Any]:
    """An object that may have these, too."""
    return {**schema, "properties": {**schema["properties"], **properties}}


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_EMBEDDING_USAGE = _object(prompt_tokens=_COUNT, total_tokens=_COUNT)
_USAGE = _object(prompt_tokens=_COUNT, total_tokens=_COUNT, completion_tokens=_COUNT)
_CALL = _object(id=_TEXT, type={"enum": ["function"]}, function=_object(name=_TEXT, arguments=_TEXT))
_MESSAGE = _optional(
    _object(role={"enum": ["assistant"]}, content=_TEXT_OR_NULL, refusal=_TEXT_OR_NULL),
    reasoning=_TEXT_OR_NULL,
    tool_calls=_list(_CALL),
)
_ENDING = {
    "logprobs": {"type": ["object", "null"]},
    "finish_reason": {"type": ["string", "null"], "description": "stop, length, tool_calls or abort."},
    "stop_reason": {"type": ["string", "integer", "null"], "description": "The stop string or token that ended it."},
}
_PIECE = {
    "index": _COUNT,
    "id": _TEXT,
    "type": {"enum": ["function"]},
    "function": {"type": "object", "properties": {"name": _TEXT, "arguments": _TEXT}},
}
_DELTA = {
    "type": "object",
    "properties": {
        "role": {"enum": ["assistant"]},
        "content": _TEXT_OR_NULL,
        "refusal": _TEXT_OR_NULL,
        "reasoning": _TEXT_OR_NULL,
        "tool_calls": _list({"type": "object", "required": ["index"], "properties": _PIECE}),
    },
}
_HEAD = {"id": _TEXT, "object": _TEXT, "created": _COUNT, "model": _TEXT}
_CARD = _object(
    id=_TEXT,
    object={"enum": ["model"]},
    created=_COUNT,
    owned_by=_TEXT,
    root=_TEXT,
    parent=_ANYTHING,
    max_model_len=_COUNT,
    permission=_ANYTHING,
)

# Of each route that answers an object.
ANSWERS = {
    "/v1/completions": _object(**_HEAD, choices=_list(_object(index=_COUNT, text=_TEXT, **_ENDING)), usage=_USAGE),
    "/v1/chat/completions": _object(
        **_HEAD, choices=_list(_object(index=_COUNT, message=_MESSAGE, **_ENDING)), usage=_USAGE
    ),
    "/v1/embeddings": _object(
        object={"enum": ["list"]},
        model=_TEXT,
        data=_list(
            _object(
                object={"enum": ["embedding"]},
                index=_COUNT,
                embedding={"anyOf": [_list({"type": "number"}), {"type": "string", "description": "base64"}]},
            )
        ),
        usage=_EMBEDDING_USAGE,
    ),
    "/v1/models": _object(object={"enum": ["list"]}, data=_list(_CARD)),
    "/v1/models/{name}": _CARD,
    "/tokenize": _optional(
        _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT)), token_strs=_or_null(_list(_TEXT))
    ),
    "/detokenize": _object(prompt=_TEXT),
    "/version": _object(version=_TEXT),
}
# Of each route that can stream: what follows `data: ` in an event.
CHUNKS = {
    "/v1/completions": {
        "type": "object",
        "required": [*_HEAD, "choices"],
        "properties": {
            **_HEAD,
            "choices": _list({"type": "object", "properties": {"index": _COUNT, "text": _TEXT, **_ENDING}}),
            "usage": _or_null(_USAGE),
        },
    },
    "/v1/chat/completions": {
        "type": "object",
        "required": [*_HEAD, "choices"],
        "properties": {
            **_HEAD,
            "choices": _list({"type": "object", "properties": {"index": _COUNT, "delta": _DELTA, **_ENDING}}),
            "usage": _or_null(_USAGE),
        },
    },
}
