"""GET /engine/state: what the page shows of the engine. Counts, ids and blocks; no text and no token of a request."""

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
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.observer import RequestEnd, StepTokens, WatchedRequest
from jaxpaged.engine.stats import EngineStats
from server.serving import within

PATH = "/engine/state"
SECONDS_FRESH = 0.3  # for so long, one snapshot serves all who ask
SECONDS_TO_ANSWER = 10.0
NUM_FIRST_TOKENS = 40

router = APIRouter()


@router.get(PATH)
async def engine_state(http: Request) -> Response:
    """The state of each core."""
    plain, packed = await within(SECONDS_TO_ANSWER, http.app.state.engine_state.get())
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding", "X-Content-Type-Options": "nosniff"}
    if "gzip" in http.headers.get("accept-encoding", ""):
        return Response(packed, headers={**headers, "Content-Encoding": "gzip"}, media_type="application/json")
    return Response(plain, headers=headers, media_type="application/json")


class EngineState:
    """Takes snapshots, each for all who ask within a moment; and, as an observer, notes times to first token."""

    def __init__(self, llm: AsyncLLM):
        self._llm = llm
        self._taken = -SECONDS_FRESH
        self._task: asyncio.Task[tuple[bytes, bytes]] | None = None
        self._first_tokens: deque[float] = deque(maxlen=NUM_FIRST_TOKENS)
        self._num_first_tokens = 0

    async def get(self) -> tuple[bytes, bytes]:
        """The state as JSON, and the same compressed.

        Raises: EngineDeadError if there is no engine any more.
        """
        task = self._task
        if task is None or (task.done() and (task.exception() or time.monotonic() - self._taken >= SECONDS_FRESH)):
            task = self._task = asyncio.create_task(self._take())
        return await asyncio.shield(task)  # one who leaves takes it from nobody

    async def _take(self) -> tuple[bytes, bytes]:
        cores = await self._llm.snapshot()
        self._taken = time.monotonic()
        told = [
            {**msgspec.structs.asdict(core), "stats": msgspec.structs.asdict(stats)}
            for core, stats in zip(cores, self._llm.stats, strict=True)
        ]
        first_tokens = {"count": self._num_first_tokens, "recent": list(self._first_tokens)}
        state = {"version": __version__, "time": self._taken, "cores": told, "first_tokens": first_tokens}
        return await asyncio.to_thread(_encoded, state)

    def on_added(self, request: WatchedRequest) -> None:
        """As Observer."""

    def on_step(self, core_index: int, stats: EngineStats, tokens: StepTokens) -> None:
        """As Observer."""
        self._num_first_tokens += len(tokens.first_token_seconds)
        self._first_tokens.extend(tokens.first_token_seconds)

    def on_finished(self, request: WatchedRequest, end: RequestEnd) -> None:
        """As Observer."""


def is_no_poll(record: logging.LogRecord) -> bool:
    """A filter of the access log: an open page alone would add two lines a second, and probes are no news."""
    message = record.getMessage()
    return not any(f"{path} HTTP" in message for path in (PATH, "/health", "/ping", "/metrics"))


def _encoded(state: dict[str, Any]) -> tuple[bytes, bytes]:
    plain = msgspec.json.encode(state)
    return plain, gzip.compress(plain, 1)
