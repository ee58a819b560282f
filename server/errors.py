"""Every failure as OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response

from jaxpaged.errors import (
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RequestTooLargeError,
    UnavailableError,
    UnsupportedError,
)
from server.watch.http_requests import CURRENT

logger = logging.getLogger("jaxpaged.server")
RETRY_SECONDS = 1  # what a client is told when the queue is full
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class APIError(Exception):
    """An answer that is an error, decided in the server itself."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers


class ClientGone(Exception):
    """The client closed the connection before it was answered."""


def error_object(error: BaseException) -> tuple[int, dict[str, dict[str, Any]]]:
    """The HTTP status and the error object of an exception."""
    message, param, code = str(error), getattr(error, "param", None), None
    if isinstance(error, APIError):
        status, code = error.status, error.code
    elif isinstance(error, RequestTooLargeError):
        status, code = 400, "context_length_exceeded"
    elif isinstance(error, UnsupportedError):  # also the InvalidRequestErrors among them
        status, code = 400, "unsupported"
    elif isinstance(error, InvalidRequestError):
        status = 400
    elif isinstance(error, EngineDeadError):
        status, code, message = 503, "engine_dead", without_details(message)
    elif isinstance(error, QueueFullError):
        status, code = 503, "queue_full"
    elif isinstance(error, UnavailableError):
        status, code, message = 503, "unavailable", without_details(message)
    else:  # a bug of ours: its details are for the log only
        status, message = 500, "internal error"
    return status, {"error": {"message": message, "type": _type(status), "param": param, "code": code}}


def without_details(message: str) -> str:
    """A message for clients. Behind a colon are another's words, such as an exception's: only the log has them."""
    return message.partition(":")[0]


def _type(status: int) -> str:
    named = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return named.get(status, "invalid_request_error" if status < 500 else "server_error")


def answered_error(error: BaseException) -> tuple[int, dict[str, dict[str, Any]]]:
    """As `error_object`, of what the running request is answered with: logs and metrics tell of it."""
    status, body = error_object(error)
    if (request := CURRENT.get()) is not None:
        request.error, request.error_status = (body["error"]["code"], body["error"]["param"]), status
    return status, body


def error_response(error: BaseException) -> Response:
    """The response to an exception."""
    status, body = answered_error(error)
    headers = {"Retry-After": str(RETRY_SECONDS)} if isinstance(error, (QueueFullError, UnavailableError)) else None
    headers = getattr(error, "headers", None) or headers
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def shown(value: Any) -> str:
    """A value of the client's in a message: short, however large it is."""
    return _SHORT.repr(value)


def install_error_handlers(app: FastAPI) -> None:
    """Makes every exception that a route may raise an error object; `RequestIdMiddleware` does the others."""

    async def failed(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def unavailable(_: Request, error: Exception) -> Response:
        logger.warning("request failed: %s", error)
        return error_response(error)

    async def no_such_route(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        what = "no such path" if status == 404 else "method not allowed"
        response = error_response(APIError(status, f"{what}: {request.method} {request.url.path}"))
        response.headers.update(getattr(error, "headers", None) or {})
        return response

    async def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(APIError(error.status_code, str(error.detail)))

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; the access log does

    for kind in (APIError, InvalidRequestError, UnsupportedError, EngineDeadError, QueueFullError):
        app.add_exception_handler(kind, failed)
    app.add_exception_handler(UnavailableError, unavailable)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(404, no_such_route)
    app.add_exception_handler(405, no_such_route)
