"""GET /metrics for Prometheus, and GET /load for load balancers."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import generate_latest

router = APIRouter()
# The format that every Prometheus reads; in the newer ones the colon of our names is none of their letters.
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(http: Request) -> Response:
    """Every metric, in Prometheus's text format. Written beside the event loop: there are thousands of lines."""
    text = await asyncio.to_thread(generate_latest, http.app.state.telemetry.registry)
    return Response(text, media_type=_CONTENT_TYPE)


@router.get("/load")
async def load(http: Request) -> dict[str, int]:
    """How many generation requests run."""
    return {"server_load": http.app.state.telemetry.http.load}
