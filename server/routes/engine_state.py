"""GET /engine/state: what the page shows of the engine. Counts, ids and blocks; no text and no token of a request.

Where keys are kept apart, ids too are for the administrator only: others see requests by their numbers.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
from collections import deque
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from jaxpaged import __version__
from jaxpaged.core.snapshot import RequestSnapshot
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.observer import RequestEnd, StepTokens, WatchedRequest
from jaxpaged.engine.stats import EngineStats
from server.routes.admin import is_administrator
from server.serving import within

PATH = "/engine/state"
SECONDS_FRESH = 0.3  # for so long, one snapshot serves all who ask
SECONDS_TO_ANSWER = 10.0
NUM_FIRST_TOKENS = 40

router = APIRouter()


@router.get(PATH)
async def engine_state(http: Request) -> Response:
    """The state of each core."""
    with_ids = getattr(http.state, "tenant", None) is None or is_administrator(http)
    plain, packed = await within(SECONDS_TO_ANSWER, http.app.state.engine_state.get(with_ids=with_ids))
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding", "X-Content-Type-Options": "nosniff"}
    if "gzip" in http.headers.get("accept-encoding", ""):
        return Response(packed, headers={**headers, "Content-Encoding": "gzip"}, media_type="application/json")
    return Response(plain, headers=headers, media_type="application/json")


class EngineState:
    """Takes snapshots, each for all who ask within a moment; and, as an observer, notes times to first token."""

    def __init__(self, llm: AsyncLLM):
        self._llm = llm
        self._taken = -SECONDS_FRESH
        self._task: asyncio.Task[_Snapshot] | None = None
        self._first_tokens: deque[float] = deque(maxlen=NUM_FIRST_TOKENS)
        self._num_first_tokens = 0

    async def get(self, *, with_ids: bool = True) -> tuple[bytes, bytes]:
        """The state as JSON, and the same compressed.

        Args:
          with_ids: tell the ids that clients gave to requests.

        Raises:
          EngineDeadError: there is no engine any more.
        """
        task = self._task
        if task is None or (task.done() and (task.exception() or time.monotonic() - self._taken >= SECONDS_FRESH)):
            task = self._task = asyncio.create_task(self._take())
            task.add_done_callback(_look_at_failure)
        snapshot = await asyncio.shield(task)  # one who leaves takes it from nobody
        return await snapshot.encoded(with_ids=with_ids)

    async def _take(self) -> _Snapshot:
        snapshots = await self._llm.snapshot()
        self._taken = time.monotonic()
        cores = [
            {**msgspec.structs.asdict(core), "stats": msgspec.structs.asdict(stats)}
            for core, stats in zip(snapshots, self._llm.stats, strict=True)
        ]
        first_tokens = {"count": self._num_first_tokens, "recent": list(self._first_tokens)}
        state = {"version": __version__, "time": self._taken, "cores": cores, "first_tokens": first_tokens}
        snapshot = _Snapshot(state)
        await snapshot.encoded(with_ids=True)
        return snapshot

    def on_added(self, request: WatchedRequest) -> None:
        """As Observer."""

    def on_step(self, core_index: int, stats: EngineStats, tokens: StepTokens) -> None:
        """As Observer."""
        self._num_first_tokens += len(tokens.first_token_seconds)
        self._first_tokens.extend(tokens.first_token_seconds)

    def on_finished(self, request: WatchedRequest, end: RequestEnd) -> None:
        """As Observer."""


def is_no_polling(record: logging.LogRecord) -> bool:
    """A filter of the access log: an open page alone would add two lines a second; and probes are news if they fail."""
    message = record.getMessage()
    if any(f"{path} HTTP" in message for path in ("/health", "/ping")):
        return not message.endswith(" 200")
    return not any(f"{path} HTTP" in message for path in (PATH, "/metrics"))


def _look_at_failure(task: asyncio.Task[Any]) -> None:
    """Whoever waits is told of it; if nobody does any more, it is no news that the engine has died."""
    if not task.cancelled():
        task.exception()


class _Snapshot:
    """One of all cores, and its forms as JSON: each is made when it is first asked for."""

    def __init__(self, state: dict[str, Any]):
        self._state = state
        self._made: dict[bool, tuple[bytes, bytes]] = {}

    async def encoded(self, *, with_ids: bool) -> tuple[bytes, bytes]:
        if with_ids not in self._made:
            self._made[with_ids] = await asyncio.to_thread(
                _encoded, self._state if with_ids else _nameless(self._state)
            )
        return self._made[with_ids]


def _nameless(state: dict[str, Any]) -> dict[str, Any]:
    """With numbers for ids: an engine's own id ends with one."""

    def nameless(request: RequestSnapshot) -> RequestSnapshot:
        return msgspec.structs.replace(request, request_id="#" + request.request_id.rpartition("#")[2])

    return {**state, "cores": [{**core, "requests": [*map(nameless, core["requests"])]} for core in state["cores"]]}


def _encoded(state: dict[str, Any]) -> tuple[bytes, bytes]:
    plain = msgspec.json.encode(state)
    return plain, gzip.compress(plain, 1)
