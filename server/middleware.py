"""What wraps every route: an answer when all else fails, request ids, and a gate.

Plain ASGI and two layers, since each takes its time with every request.
"""

from __future__ import annotations

import ipaddress
import re
import uuid
from typing import Any
from urllib.parse import urlsplit

from server import page
from server.api_keys import ApiKeys
from server.config import ServerConfig
from server.errors import RETRY_SECONDS, APIError, error_response, logger
from server.watch.http_requests import HttpWatch
from server.watch.request_log import log_refusal

# Probes must work without a key and under any load; everything else is denied by default.
OPEN_PATHS = frozenset({"/health", "/ping", "/version"})
_LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_REQUEST_ID = re.compile(rb"[\x20-\x7e]{0,256}")


class RequestIdMiddleware:
    """Gives each request an id, the client's `X-Request-Id` if it sent one, and echoes it in the response.

    It answers an exception that nothing else caught; the connection stays usable, unlike with starlette's own way.
    And HEAD is answered as GET: the HTTP server leaves out the body.
    A route that has started its response may send parts of the body by `state["send"]`, past all layers but what is
    around this one: they look at nothing between start and end, but each would take its time with every part.
    """

    def __init__(self, app: Any, watch: HttpWatch, *, log_requests: bool = False):
        self._app, self._watch, self._log_requests = app, watch, log_requests

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        app, given = self._app, header(scope, b"x-request-id")
        if not _REQUEST_ID.fullmatch(given):
            app, given = (
                error_response(APIError(400, "X-Request-Id must be at most 256 printable ASCII characters")),
                b"",
            )
        request_id = given.decode("ascii") or uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, send=send)
        watched = self._watch.begin(scope, request_id)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        status: int | None = None

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if status is None:
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            await app(scope, receive, send_with_id)
        except Exception as e:
            if status is not None:
                raise
            logger.exception("request %s failed", request_id)
            await error_response(e)(scope, receive, send_with_id)
        finally:
            if status is not None and watched.error_status is not None:  # of a stream that has failed midway
                status = watched.error_status
            self._watch.end(watched, status)
            if status is not None and status >= 400:
                log_refusal(watched, status, enabled=self._log_requests)


class AccessMiddleware:
    """Turns away who has no key, pages of other origins, and what is too much at once; before a body is read."""

    def __init__(self, app: Any, config: ServerConfig, keys: ApiKeys | None):
        self._app, self._keys, self._limit = app, keys, config.limit_concurrency
        self._isolate = keys is not None and len(keys) > 1 and config.isolate_api_keys
        self._root = config.root_path.rstrip("/")
        paths = OPEN_PATHS | page.FILES.keys() if config.enable_public_page else OPEN_PATHS
        self._open = frozenset(paths)
        self._origins = frozenset(config.allowed_origins)
        self._only_local_names = keys is None and config.host in _LOCAL_HOSTS
        self._running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._root:  # routes are found with and without it: a proxy may strip it or not
            scope = {**scope, "root_path": self._root}
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._route(scope["path"]) in self._open):
            await self._app(scope, receive, send)
            return
        error = self._refusal(scope)
        if error is not None:
            await _refuse(error, scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1

    def _route(self, path: str) -> str:
        """The path that routes are compared with."""
        root = self._root
        return path[len(root) :] if root and (path == root or path.startswith(root + "/")) else path

    def _refusal(self, scope: Any) -> APIError | None:
        if self._keys is not None:
            tenant = self._keys.tenant(header(scope, b"authorization"))
            if tenant is None:
                message = "a valid API key is needed: Authorization: Bearer KEY"
                return APIError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            if self._isolate:
                scope.setdefault("state", {})["tenant"] = tenant
        if scope.get("method") not in _READING and (origin := header(scope, b"origin")):
            error = self._foreign(origin.decode("latin-1"), header(scope, b"host").decode("latin-1"))
            if error is not None:
                return error
        if self._limit is not None and self._running >= self._limit:
            message = f"{self._running} requests are served already"
            return APIError(503, message, code="too_many_requests", headers={"Retry-After": str(RETRY_SECONDS)})
        return None

    def _foreign(self, origin: str, host: str) -> APIError | None:
        """Why a web page of this origin may not change anything here.

        A page of any site can send requests to this machine's own addresses. Browsers say in `Origin` who asks: ours
        is the origin that is asked. But what a name means may change under a page. So a server without keys that
        listens on loopback takes for its own only names that always mean this machine, and addresses. One that listens
        elsewhere takes any name: it does not know its own, and whoever reaches it may use it anyway.
        """
        if "*" in self._origins or origin in self._origins:
            return None
        try:
            asker = urlsplit(origin)
            ours = bool(asker.netloc) and asker.netloc == host.lower()
            ours = ours and not (self._only_local_names and not _is_fixed(asker.hostname or ""))
        except ValueError:  # it is no URL
            ours = False
        message = f"requests of the origin {origin!r:.80} are not allowed; see --allowed-origins"
        return None if ours else APIError(403, message, code="origin_not_allowed")


async def _refuse(error: APIError, scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await error_response(error)(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": ""})


def _is_fixed(name: str) -> bool:
    """Whether a host's name is an address, or one that always means this machine."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return True


def header(scope: Any, name: bytes) -> bytes:
    """A header of a request; empty if it has none."""
    return next((value for key, value in scope["headers"] if key == name), b"")
