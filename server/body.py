"""A request's body: read up to a limit, then checked against its model; every fault names the field."""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from server.errors import APIError, ClientGone, shown

MAX_BODY_BYTES = 32 << 20
M = TypeVar("M", bound=BaseModel)


async def read_body(http: Request, model: type[M]) -> M:
    """The body as `model`.

    Raises:
      APIError: 400 if it is not JSON or not a `model`, 413 if it is too large, 415 if it is said to be no JSON.
    """
    content_type = http.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise APIError(415, f"Content-Type is {content_type!r}; it must be application/json")
    raw = await _bytes(http)
    try:
        # Two steps: in one, pydantic would hold all of the body in a form of its own as well.
        body = pydantic_core.from_json(raw)
    except ValueError as e:
        raise APIError(400, f"the body is not JSON: {e}") from e
    try:
        return model.model_validate(body)
    except ValidationError as e:
        raise _first_fault(e, body) from e


async def _bytes(http: Request) -> bytes:
    """Reads the body itself rather than through `http.stream()`, which needs starlette to know of a lost client."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > MAX_BODY_BYTES:
            raise APIError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return b"".join(chunks)


def _first_fault(error: ValidationError, body: Any) -> APIError:
    fault = error.errors(include_url=False)[0]
    param = str(fault["loc"][0]) if fault["loc"] else fault.get("ctx", {}).get("param")
    code = "unsupported" if fault["type"] == "unsupported" else None
    return APIError(400, _message(fault, body), param=param, code=code)


def _message(fault: ErrorDetails, body: Any) -> str:
    where = _place(fault, body)
    if fault["type"] == "extra_forbidden":
        return f"unknown field {where!r}"
    if fault["type"] == "missing":
        return f"{where} is missing"
    if fault["type"] in ("unsupported", "invalid"):  # ours: they name field and value themselves
        return fault["msg"]
    return f"{where or 'the body'}: {fault['msg']}, not {shown(fault['input'])}"


def _place(fault: ErrorDetails, body: Any) -> str:
    """Where in the body a fault is, without the union members that pydantic names on the way.

    Those are what the body does not have there. That of `response_format`, which is its type, may also be a key of it.
    """
    parts, value = [], body
    last = len(fault["loc"]) - 1
    for i, part in enumerate(fault["loc"]):
        if i == 1 and fault["loc"][0] == "response_format":
            continue
        try:
            value = value[part]
        except (LookupError, TypeError):
            if i < last or fault["type"] != "missing":
                continue
        parts.append(str(part))
    return ".".join(parts)
