"""Each HTTP request: who asks for what, known to logs and traces while it runs, and counted when it has ended."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter

from jaxpaged.engine.histogram import Histogram

# Those whose live requests are the server's load.
GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/embeddings"})
NO_ROUTE = "none"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_CLIENT_GONE = 499


@dataclass(slots=True)
class HttpRequest:
    """One request.

    Attributes:
      request_id: the client's `X-Request-Id`, or one that was given to it.
      scope: as ASGI tells it.
      route: the template of its path, of which there are few; "none" before it is found, or if it was turned away.
      error: `code` and `param` of the error that it is answered with.
      error_status: the status of that error, which may come when a stream has begun with another; None: there is none.
      started: when it came, as `time.perf_counter` tells it.
    """

    request_id: str
    scope: Any
    route: str = NO_ROUTE
    started: float = field(default_factory=time.perf_counter)
    error: tuple[str | None, str | None] = (None, None)
    error_status: int | None = None

    @property
    def method(self) -> str:
        """Its method; "other" for what is none of the usual ones."""
        method = self.scope["method"]
        return method if method in _METHODS else "other"

    def header(self, name: str) -> str:
        """A header; empty if it has none."""
        wanted = name.encode()
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == wanted), "")


CURRENT: ContextVar[HttpRequest | None] = ContextVar("http_request", default=None)
"""The request that the running task serves."""


async def note_route(http: Request) -> None:
    """A dependency of every route: notes which one was found."""
    request = CURRENT.get()
    if request is not None:
        request.route = getattr(http.scope.get("route"), "path", NO_ROUTE)


class HttpWatch:
    """Counts requests.

    Attributes:
      load: generation requests that run.
    """

    def __init__(self, registry: CollectorRegistry, root_path: str = ""):
        root = root_path.rstrip("/")
        self._loads = GENERATION_PATHS | {root + path for path in GENERATION_PATHS}
        self._requests = Counter(
            "http_requests",
            "HTTP requests that have been answered, by route, method and status.",
            ["handler", "method", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            registry,
            ["http_request_duration_seconds"],
            "Time from a request's head to the end of its answer.",
            ["handler", "method"],
            _SECONDS,
        )
        self.load = 0

    def begin(self, scope: Any, request_id: str) -> HttpRequest:
        """A request has come; it is CURRENT from now on."""
        request = HttpRequest(request_id, scope)
        self.load += scope["path"] in self._loads
        CURRENT.set(request)
        return request

    def end(self, request: HttpRequest, status: int | None) -> None:
        """It has been answered, or its client has gone before that."""
        self.load -= request.scope["path"] in self._loads
        labels = request.route, request.method
        self._requests.labels(*labels, str(status or _CLIENT_GONE)).inc()
        self._seconds.labels(*labels).observe(time.perf_counter() - request.started)
