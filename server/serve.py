"""`jaxpaged serve MODEL`: the HTTP server."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import sys
import threading
import time
from typing import Any

import uvicorn

from jaxpaged.config import EngineConfig
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.core_client import InProcessClient
from jaxpaged.engine.load import load_engine
from jaxpaged.progress import ProgressBars
from server.api_keys import configured_keys
from server.app import create_app
from server.config import ServerConfig
from server.connection import uvicorn_options
from server.listen import Listener
from server.start_page import start_page

# Between the engine's death and the exit of the process: time for probes to read the 503.
SECONDS_TO_REPORT_DEATH = 2.0


def serve(config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the server until a signal or the engine's end; the exit status.

    Raises:
      ConfigError: it cannot listen where it shall, found before the weights load; or an option does not fit the model.
      ModelError: the model cannot be used.
    """
    configured_keys(server_config)  # a wrong file is found at once, as is a taken port
    with Listener(server_config) as listener:
        signal.signal(signal.SIGTERM, _raise_terminated)
        started = time.monotonic()
        with ProgressBars() as bars:
            engine, tokenizer = load_engine(config, bars.update)
        server = DyingServer()
        llm = AsyncLLM(InProcessClient(engine, tokenizer), tokenizer, on_death=server.engine_died)
        app = create_app(llm, server_config)
        page = start_page(
            engine.config,
            server_config,
            listener,
            num_cores=1,
            num_programs=engine.num_programs,
            weight_bytes=bars.totals.get("load"),
            seconds=time.monotonic() - started,
        )
        print(page, file=sys.stderr, flush=True)
        server.configure(
            uvicorn.Config(
                app,
                log_level=server_config.uvicorn_log_level,
                access_log=not server_config.disable_uvicorn_access_log,
                timeout_graceful_shutdown=max(1, round(server_config.shutdown_timeout)),
                ssl_keyfile=server_config.ssl_keyfile,
                ssl_certfile=server_config.ssl_certfile,
                ssl_ca_certs=server_config.ssl_ca_certs,
                ssl_cert_reqs=ssl.CERT_REQUIRED if server_config.ssl_ca_certs else ssl.CERT_NONE,
                **uvicorn_options(server_config),
            )
        )
        with contextlib.suppress(KeyboardInterrupt, _Terminated):  # uvicorn repeats the signal once it has drained
            server.run(listener.opened())
        return 1 if llm.error is not None else 0


class DyingServer:
    """A uvicorn server that stops soon after its engine has failed."""

    def __init__(self) -> None:
        self._server: uvicorn.Server | None = None
        self._dead = False

    def configure(self, config: uvicorn.Config) -> None:
        """Sets what to run."""
        self._server = uvicorn.Server(config)

    def run(self, listener: socket.socket) -> None:
        """Serves on a bound socket until told to stop."""
        assert self._server is not None
        if not self._dead:
            self._server.run(sockets=[listener])

    def engine_died(self, _: BaseException) -> None:
        """Called in the engine thread."""
        self._dead = True
        timer = threading.Timer(SECONDS_TO_REPORT_DEATH, self._stop)
        timer.daemon = True
        timer.start()

    def _stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True


class _Terminated(SystemExit):
    """SIGTERM came."""


def _raise_terminated(signum: int, _: Any) -> None:
    raise _Terminated(128 + signum)
