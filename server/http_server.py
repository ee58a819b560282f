"""The server of the HTTP app: it runs on a socket until it is told to stop, or its engine has died."""

from __future__ import annotations

import logging
import socket
import ssl
import threading

import uvicorn

from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.core_client import EngineCoreClient
from jaxpaged.engine.garbage import collect_seldom
from jaxpaged.text.tokenizer import Tokenizer
from server.app import create_app
from server.config import ServerConfig
from server.connection import uvicorn_options
from server.draining import DrainingServer
from server.routes.engine_state import is_no_polling

# Between the engine's death and the exit of the process: time for probes to read the 503.
SECONDS_TO_REPORT_DEATH = 2.0


class HTTPServer:
    """A uvicorn server that drains when it is told to stop, and stops soon after its engine has failed.

    Attributes:
      error: why the engine has failed; None if it has not.
    """

    def __init__(self, client: EngineCoreClient, tokenizer: Tokenizer, config: ServerConfig):
        self._server: DrainingServer | None = None
        self._dead = False
        self._llm = AsyncLLM(client, tokenizer, on_death=self._engine_died)
        self._server = DrainingServer(
            uvicorn.Config(
                create_app(self._llm, config),
                log_config=None,  # see log_format
                lifespan="on",  # what fails at the start is an error, not a server that never drains
                log_level=config.uvicorn_log_level,
                access_log=not config.disable_uvicorn_access_log,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                ssl_ca_certs=config.ssl_ca_certs,
                ssl_cert_reqs=ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
                **uvicorn_options(config),
            ),
            self._llm,
            config.shutdown_timeout,
        )

    @property
    def error(self) -> BaseException | None:
        return self._llm.error

    def run(self, listener: socket.socket) -> None:
        """Serves on a bound socket until told to stop."""
        assert self._server is not None
        logging.getLogger("uvicorn.access").addFilter(is_no_polling)
        collect_seldom()
        if not self._dead:
            self._server.run(sockets=[listener])

    def _engine_died(self, _: BaseException) -> None:
        """Called in another thread, maybe before there is a server."""
        self._dead = True
        timer = threading.Timer(SECONDS_TO_REPORT_DEATH, self._stop)
        timer.daemon = True
        timer.start()

    def _stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
