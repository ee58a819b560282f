"""What only the administrator may do: POST /reset_prefix_cache, /start_profile and /stop_profile."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from server.api_keys import ApiKeys
from server.errors import APIError
from server.serving import serving, within

SECONDS_TO_ANSWER = 30.0
SECONDS_TO_PROFILE = 300.0  # a long trace is long in the writing


def is_administrator(http: Request) -> bool:
    """Whether an administrator asks."""
    keys = ApiKeys(serving(http).config.admin_api_key)
    return keys.tenant(http.headers.get("authorization", "").encode("latin-1")) is not None


async def administrator(http: Request) -> None:
    """Raises: APIError 403 if there is no administrator or this is not the one."""
    if not serving(http).config.admin_api_key:
        raise APIError(403, f"{http.url.path} is for administrators: start the server with --admin-api-key KEY")
    if not is_administrator(http):
        raise APIError(
            403, f"{http.url.path} needs an administrator's key: Authorization: Bearer KEY", code="invalid_api_key"
        )


router = APIRouter(dependencies=[Depends(administrator)])


@router.post("/reset_prefix_cache", response_class=Response)
async def reset_prefix_cache(http: Request) -> Response:
    """Forgets every cached prefix. Live requests go on."""
    await within(SECONDS_TO_ANSWER, serving(http).llm.reset_prefix_cache())
    return Response(status_code=200)


@router.post("/start_profile", response_class=Response)
async def start_profile(http: Request) -> Response:
    """Starts a trace of the engine, with JAX's profiler."""
    folder = _profiler_dir(http)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise APIError(500, f"profiler_dir={str(folder)!r} cannot be made: {e.strerror}") from e
    await within(SECONDS_TO_PROFILE, serving(http).llm.start_profile(str(folder)))
    return Response(status_code=200)


@router.post("/stop_profile", response_class=Response)
async def stop_profile(http: Request) -> Response:
    """Ends the trace and writes it, for which the engine stands still."""
    _profiler_dir(http)
    await within(SECONDS_TO_PROFILE, serving(http).llm.stop_profile())
    return Response(status_code=200)


def _profiler_dir(http: Request) -> Path:
    folder = serving(http).config.profiler_dir
    if folder is None:
        raise APIError(400, "there is no folder for traces: start the server with --profiler-dir FOLDER")
    return Path(folder)
