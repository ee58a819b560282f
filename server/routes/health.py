"""GET /health, /ping and /version: for probes, without a key."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jaxpaged import __version__
from server.serving import serving

router = APIRouter()


@router.get("/health", response_class=Response)
async def health(http: Request) -> Response:
    """200 while requests are served; 503 once the engine has failed.

    A server that drains listens no more: new probes find nobody, as before the start. Who is connected still gets 200,
    until the time to drain is over, and then 503.
    """
    serving(http).check_health()
    return Response(status_code=200)


@router.get("/ping", response_class=Response)
@router.post("/ping", response_class=Response)
async def ping(http: Request) -> Response:
    """As /health."""
    return await health(http)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of jaxpaged."""
    return {"version": __version__}
