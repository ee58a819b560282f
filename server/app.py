"""The FastAPI application. It is given its engine, so that tests can give it another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI

from jaxpaged import __version__
from jaxpaged.engine.async_llm import AsyncLLM
from server.errors import install_error_handlers
from server.middleware import ApiKeys, Crashes, RequestIds
from server.routes import chat, completions, health, models
from server.serving import Serving


def create_app(
    llm: AsyncLLM,
    *,
    model_names: Sequence[str],
    api_keys: Sequence[str] = (),
    root_path: str = "",
    drain_seconds: float = 30.0,
) -> FastAPI:
    """The application that serves one engine.

    Args:
      llm: the engine. It is shut down with the application.
      model_names: names that requests may use, at least one.
      api_keys: if any, every route but the probes needs one of them.
      root_path: prefix under which a proxy serves it.
      drain_seconds: how long a shutdown waits for running requests.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        await llm.shutdown(drain_seconds)

    app = FastAPI(title="jaxpaged", version=__version__, root_path=root_path, lifespan=lifespan)
    app.state.serving = Serving(llm, tuple(model_names))
    install_error_handlers(app)
    for module in (completions, chat, models, health):
        app.include_router(module.router)
    app.add_middleware(Crashes)
    if api_keys:
        app.add_middleware(ApiKeys, keys=tuple(api_keys))
    app.add_middleware(RequestIds)
    return app
