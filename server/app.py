"""The FastAPI application. It is given its engine, so that tests can give it another."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from jaxpaged import __version__
from jaxpaged.engine.async_llm import AsyncLLM
from server.config import ServerConfig
from server.errors import install_error_handlers
from server.middleware import ApiKeys, Crashes, RequestIds
from server.routes import chat, completions, health, models
from server.serving import Serving

ROUTES = (completions, chat, models, health)


def create_app(llm: AsyncLLM, config: ServerConfig) -> FastAPI:
    """The application that serves one engine.

    Args:
      llm: the engine. It is shut down with the application.
      config: the server's options.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        await llm.shutdown(config.shutdown_timeout)

    app = FastAPI(title="jaxpaged", version=__version__, root_path=config.root_path, lifespan=lifespan)
    app.state.serving = Serving(llm, config)
    install_error_handlers(app)
    for module in ROUTES:
        app.include_router(module.router)
    app.add_middleware(Crashes)
    if config.api_key:
        app.add_middleware(ApiKeys, keys=config.api_key)
    app.add_middleware(RequestIds)
    return app
