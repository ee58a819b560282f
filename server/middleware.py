"""What wraps every route: request ids, API keys, and an answer when all else fails.

Plain ASGI, so that streams pass through untouched.
"""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Sequence
from typing import Any

from server.errors import APIError, error_response, logger

# Probes must work without a key; everything else is denied by default.
OPEN_PATHS = frozenset({"/health", "/ping", "/version"})
MAX_REQUEST_ID_CHARS = 256


class RequestIds:
    """Gives each request an id, the client's `X-Request-Id` if it sent one, and echoes it in the response."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        if len(given) > MAX_REQUEST_ID_CHARS or not given.isascii():
            error = APIError(400, f"X-Request-Id must be at most {MAX_REQUEST_ID_CHARS} ASCII characters")
            await error_response(error)(scope, receive, send)
            return
        request_id = given.decode("ascii") or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class Crashes:
    """Answers an exception that nothing else caught. The connection stays usable, unlike with starlette's own way."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        started = False

        async def watched_send(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as e:
            if started or scope["type"] != "http":
                raise
            logger.exception("a request failed")
            await error_response(e)(scope, receive, send)


class ApiKeys:
    """Lets through only requests with `Authorization: Bearer KEY`, but for OPEN_PATHS."""

    def __init__(self, app: Any, keys: Sequence[str]):
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        error = APIError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        await error_response(error)(scope, receive, send)

    def _allowed(self, scope: Any) -> bool:
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        # Compares with every key, so that the time does not tell which one was close.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def _header(scope: Any, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")
