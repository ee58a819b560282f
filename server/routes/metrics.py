"""GET /metrics for Prometheus, and GET /load for load balancers."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client.exposition import choose_encoder

router = APIRouter()


@router.get("/metrics")
async def metrics(http: Request) -> Response:
    """Every metric, as text or in the OpenMetrics format."""
    encode, content_type = choose_encoder(http.headers.get("accept", ""))
    return Response(encode(http.app.state.telemetry.registry), media_type=content_type)


@router.get("/load")
async def load(http: Request) -> dict[str, int]:
    """How many generation requests run."""
    return {"server_load": http.app.state.telemetry.http.load}
