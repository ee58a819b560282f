"""A request's body: read up to a limit, then checked against its model; every fault names the field."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from server.api_keys import tenant_salt
from server.errors import APIError, ClientGone, shown
from server.limits import check_limits
from server.serving import serving

# A parser holds up every thread. So what takes it long is refused unparsed: the text alone may be long.
MAX_NUM_VALUES = 1 << 21
MAX_NUM_QUOTES = 1 << 21  # two a string; text has few
MAX_NUM_CONTAINERS = 1 << 18
MAX_NUM_FAULTS = 1000  # of those that pydantic finds: see `server.protocol.body.Strict`
LONG_BODY = 64 << 10  # bytes from which on it is checked in another thread
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


async def read_body(http: Request, model: type[M]) -> M:
    """The body as `model`. With a key per tenant, its `cache_salt` is the tenant's own.

    Raises:
      APIError: 400 if it is not JSON or not a `model`, or asks for more than the operator allows, 408 if it takes too
        long to come, 413 if it is too large, 415 if it is said to be no JSON.
    """
    _check_headers(http)
    raw = await _bytes(http)
    http.state.has_long_body = len(raw) >= LONG_BODY
    body = await beside(http, lambda: _checked(raw, model))
    check_limits(body, serving(http).config)
    tenant = getattr(http.state, "tenant", None)
    if tenant is not None and "cache_salt" in model.model_fields:
        body.cache_salt = tenant_salt(tenant, body.cache_salt)  # type: ignore[attr-defined]
    return body


async def beside(http: Request, work: Callable[[], T]) -> T:
    """The result of `work`, done beside the event loop if the body is long: it may hold megabytes of whatever it holds.

    Call it when the body has been read.
    """
    return await asyncio.to_thread(work) if http.state.has_long_body else work()


def _check_headers(http: Request) -> None:
    content_type = http.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise APIError(415, f"Content-Type is {shown(content_type)}; it must be application/json")
    coding = http.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise APIError(415, f"Content-Encoding is {shown(coding)}; a body must be sent as it is")
    length = http.headers.get("content-length", "0")
    if len(length) > 18 or int(length) > serving(http).config.max_body_bytes:
        raise _too_large(http)


async def _bytes(http: Request) -> bytes:
    """Reads the body itself rather than through `http.stream()`, which needs starlette to know of a lost client."""
    config = serving(http).config
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.request_body_timeout):
            while True:
                message = await http.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > config.max_body_bytes:
                    raise _too_large(http)
                if not message.get("more_body"):
                    return b"".join(chunks)
    except TimeoutError:
        message = f"the body did not come within {config.request_body_timeout} seconds"
        raise APIError(408, message, headers={"Connection": "close"}) from None


def _too_large(http: Request) -> APIError:
    return APIError(413, f"the body is larger than {serving(http).config.max_body_bytes} bytes")


def _checked(raw: bytes, model: type[M]) -> M:
    containers = raw.count(b"{") + raw.count(b"[") + raw.count(b":")
    if containers > MAX_NUM_CONTAINERS or raw.count(b",") > MAX_NUM_VALUES:
        limits = f"{MAX_NUM_VALUES} commas or {MAX_NUM_CONTAINERS} braces, brackets and colons"
        raise APIError(413, f"the body holds more than {limits}")
    if raw.count(b'"') > MAX_NUM_QUOTES:
        raise APIError(413, f"the body holds more than {MAX_NUM_QUOTES} quotation marks")
    try:
        # Two steps: in one, pydantic would hold all of the body in a form of its own as well.
        body = pydantic_core.from_json(raw)
    except ValueError as e:
        raise APIError(400, f"the body is not JSON: {e}") from e
    try:
        return model.model_validate(body)
    except ValidationError as e:
        raise _first_fault(e, body) from e


def _first_fault(error: ValidationError, body: Any) -> APIError:
    if error.error_count() > MAX_NUM_FAULTS:  # a dict of each would be made
        return APIError(400, f"the body has {error.error_count()} faults")
    fault = error.errors(include_url=False)[0]
    param = str(fault["loc"][0]) if fault["loc"] else fault.get("ctx", {}).get("param")
    code = "unsupported" if fault["type"] == "unsupported" else None
    return APIError(400, _message(fault, body), param=param, code=code)


def _message(fault: ErrorDetails, body: Any) -> str:
    where = _place(fault, body)
    if fault["type"] == "unknown":
        name = ".".join(filter(None, (where, fault["ctx"]["param"])))  # type: ignore[typeddict-item]
        return f"unknown field {name!r:.80}; it is refused rather than ignored"
    if fault["type"] == "missing":
        return f"{where} is missing"
    if fault["type"] in ("unsupported", "invalid"):  # ours: they name field and value themselves
        return fault["msg"]
    return f"{where or 'the body'}: {fault['msg']}, not {shown(fault['input'])}"


def _place(fault: ErrorDetails, body: Any) -> str:
    """Where in the body a fault is. Drops the union-member names that pydantic puts into `loc`.

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
