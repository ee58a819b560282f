"""What /openapi.json says beyond what FastAPI finds out itself: errors, keys, what answers hold."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from server.answer_schemas import ANSWERS, CHUNKS

_NULL_OR_TEXT = {"type": ["string", "null"]}
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULL_OR_TEXT,
                "code": _NULL_OR_TEXT,
            },
        }
    },
}
_ALWAYS = {
    400: "The request is wrong; `param` names the field.",
    404: "There is no such model or path.",
    500: "A fault of the server.",
    503: "The engine has failed or shuts down, or too much is asked for at once; see `Retry-After`.",
}
_WITH_KEYS = {401: "No valid API key was sent."}
_WHEN_CHANGING = {403: "The request comes from a web page of an origin that is not allowed, or needs another key."}
_WITH_BODY = {
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is said to be no JSON, or to be compressed.",
}


def complete_openapi(app: FastAPI, *, with_keys: bool) -> None:
    """Makes the schema tell of all that a client may get."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        made = app.openapi_schema is not None
        schema = plain()
        if not made:
            _complete(schema, with_keys)
        return schema

    app.openapi = openapi


def _complete(schema: dict[str, Any], with_keys: bool) -> None:
    components = schema.setdefault("components", {})
    components["schemas"] = {"Error": ERROR_SCHEMA}
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            _complete_operation(operation, path, method, with_keys)


def _complete_operation(operation: dict[str, Any], path: str, method: str, with_keys: bool) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # ours are 400
    errors = _ALWAYS | (_WITH_KEYS if with_keys else {}) | (_WHEN_CHANGING if method != "get" else {})
    if "requestBody" in operation:
        errors |= _WITH_BODY
    for status, description in sorted(errors.items()):
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        responses.setdefault(str(status), {"description": description, "content": content})
    content = responses["200"].get("content", {})
    if path in ANSWERS:
        content["application/json"] = {"schema": ANSWERS[path]}
    if path in CHUNKS:
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event": CHUNKS[path]}
