"""GET /, /docs and /page/NAME: the page and what it loads."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response

from server.page import served_files
from server.serving import serving

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(http: Request) -> Response:
    """The playground and the live view of the engine."""
    return _served(http, "/")


@router.get("/docs")
async def docs(http: Request) -> Response:
    """The endpoints, from /openapi.json."""
    return _served(http, "/docs")


@router.get("/page/{name}")
async def file(http: Request, name: str) -> Response:
    """A file that they load."""
    return _served(http, f"/page/{name}")


def _served(http: Request, path: str) -> Response:
    config = serving(http).config
    found = served_files(page=config.page, docs=not config.disable_fastapi_docs).get(path)
    if found is None:
        raise HTTPException(404)
    if http.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=found.headers)
    return Response(found.content, headers=found.headers, media_type=found.media_type)
