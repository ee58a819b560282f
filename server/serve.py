"""`jaxpaged serve MODEL`: the HTTP server."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import uvicorn

from jaxpaged.checkpoint.source import open_model
from jaxpaged.config import EngineConfig
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.core_client import EngineCoreClient
from jaxpaged.engine.garbage import collect_seldom
from jaxpaged.engine.process_client import ProcessClient
from jaxpaged.progress import ProgressBars
from jaxpaged.text.tokenizer import Tokenizer
from server.app import create_app
from server.config import ServerConfig
from server.connection import uvicorn_options
from server.draining import DrainingServer
from server.generation_defaults import resolve_generation
from server.listen import Listener
from server.routes.engine_state import is_no_polling
from server.start_page import start_page
from server.watch.log_format import configure_logging

# Between the engine's death and the exit of the process: time for probes to read the 503.
SECONDS_TO_REPORT_DEATH = 2.0


def serve(config: EngineConfig, server_config: ServerConfig, listener: Listener) -> int:
    """Runs the server until a signal or the engine's end; the exit status.

    Args:
      listener: where it shall listen, taken already.

    Raises:
      ConfigError: an option does not fit the model.
      ModelError: the model cannot be used.
    """
    configure_logging(server_config.log_level)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _raise_terminated)
    started = time.monotonic()
    with contextlib.closing(
        ProcessClient(config, num_cores=server_config.data_parallel_size, timeout=server_config.engine_timeout)
    ) as client:
        with ProgressBars(config.compilation_cache_dir) as bars:
            tokenizer, generation = open_front(config)  # while the engine loads
            server_config = resolve_generation(server_config, lambda: generation)  # what is wrong ends it now
            client.wait_until_ready(bars.update)
        page = start_page(
            client.facts.config,
            client.programs,
            server_config,
            listener,
            num_cores=client.num_cores,
            weight_bytes=bars.totals.get("load"),
            seconds=time.monotonic() - started,
        )
        return _serve(client, tokenizer, server_config, listener, page)


def open_front(config: EngineConfig) -> tuple[Tokenizer, Mapping[str, Any]]:
    """What this process needs of a model: its tokenizer, and what its generation_config.json says."""
    source = open_model(config.model, load_format="dummy")  # the weights are for the engine's process
    tokenizer = Tokenizer.from_name(config.tokenizer) if config.tokenizer else Tokenizer.from_source(source)
    return tokenizer, source.generation_config


def _serve(client: EngineCoreClient, tokenizer: Tokenizer, config: ServerConfig, listener: Listener, page: str) -> int:
    server = DyingServer()
    llm = AsyncLLM(client, tokenizer, on_death=server.engine_died)
    app = create_app(llm, config)
    print(page, file=sys.stderr, flush=True)
    server.configure(
        DrainingServer(
            uvicorn.Config(
                app,
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
            llm,
            config.shutdown_timeout,
        )
    )
    logging.getLogger("uvicorn.access").addFilter(is_no_polling)
    collect_seldom()
    with contextlib.suppress(KeyboardInterrupt, _Terminated):  # uvicorn repeats the signal once it has drained
        server.run(listener.opened())
    return 1 if llm.error is not None else 0


class DyingServer:
    """A uvicorn server that stops soon after its engine has failed."""

    def __init__(self) -> None:
        self._server: uvicorn.Server | None = None
        self._dead = False

    def configure(self, server: uvicorn.Server) -> None:
        """Sets what to run."""
        self._server = server

    def run(self, listener: socket.socket) -> None:
        """Serves on a bound socket until told to stop."""
        assert self._server is not None
        if not self._dead:
            self._server.run(sockets=[listener])

    def engine_died(self, _: BaseException) -> None:
        """Called in another thread."""
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
