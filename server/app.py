"""The FastAPI application. It is given its engine, so that tests can give it another."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware

from jaxpaged import __version__
from jaxpaged.engine.async_llm import AsyncLLM
from server.api_keys import ApiKeys, configured_keys
from server.chat.template import read_chat_template
from server.config import ServerConfig
from server.errors import install_error_handlers
from server.generation_defaults import generation_config_of, resolve_generation
from server.middleware import AccessMiddleware, RequestIdMiddleware
from server.openapi import complete_openapi
from server.routes import admin, chat, completions, embeddings, engine_state, health, metrics, models, page, tokenize
from server.serving import Serving
from server.watch.http_requests import note_route
from server.watch.telemetry import Telemetry

ROUTES = (completions, chat, embeddings, tokenize, models, health, metrics, admin, page)


def create_app(llm: AsyncLLM, config: ServerConfig) -> FastAPI:
    """The application that serves one engine.

    Args:
      llm: the engine. It is shut down with the application.
      config: the server's options. What they leave to the model is read from its files.

    Raises:
      ConfigError: an option does not fit the model.
    """
    config = resolve_generation(config, lambda: generation_config_of(llm.config.model))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        try:
            await llm.shutdown(config.shutdown_timeout)
        finally:
            await telemetry.close()

    app = FastAPI(
        title="jaxpaged",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's loads scripts from elsewhere: ours is in `routes.page`
        redoc_url=None,
        openapi_url=None if config.disable_fastapi_docs else "/openapi.json",
        dependencies=[Depends(note_route)],
    )
    if config.chat_template is not None:
        llm.tokenizer.use_chat_template(read_chat_template(config.chat_template))
    app.state.serving = serving = Serving(llm, config)
    app.state.telemetry = telemetry = Telemetry(llm, config, serving.model_names[0])
    install_error_handlers(app)
    for module in ROUTES:
        app.include_router(module.router)
    if config.page:
        app.state.engine_state = state = engine_state.EngineState(llm)
        llm.observers.add(state)
        app.include_router(engine_state.router)
    _wrap(app, config, telemetry)
    return app


def _wrap(app: FastAPI, config: ServerConfig, telemetry: Telemetry) -> None:
    """Puts what concerns every route around the app, the innermost first."""
    keys = configured_keys(config)
    app.add_middleware(AccessMiddleware, config=config, keys=ApiKeys((*keys, *config.admin_api_key)) if keys else None)
    complete_openapi(app, with_keys=bool(keys))
    app.add_middleware(RequestIdMiddleware, watch=telemetry.http, log_requests=config.enable_log_requests)
    if config.allowed_origins:  # outermost: a refusal too must be readable for a page that is allowed
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("X-Request-Id",),
        )
