"""`jaxpaged serve MODEL`: the HTTP server."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import ssl
import sys
import threading
import time
from typing import Any

import uvicorn

from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.core_client import InProcessClient
from jaxpaged.engine.load import load_engine
from jaxpaged.progress import ProgressBars
from server.api_keys import configured_keys
from server.app import create_app
from server.connection import uvicorn_options
from server.listen import Listener
from server.option_file import read_options
from server.options import add_flags, engine_config_of, flags, server_config_of
from server.start_page import start_page
from server.vllm_flags import add_vllm_flags

API_KEY_VARIABLE = "JAXPAGED_API_KEY"
# Between the engine's death and the exit of the process: time for probes to read the 503.
SECONDS_TO_REPORT_DEATH = 2.0


def add_serve_command(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI does",
        usage="jaxpaged serve MODEL [options]",
        description="Serves a model over HTTP, as OpenAI does. Flags are vLLM's where the meaning is the same.",
        epilog=f"An API key may be given in {API_KEY_VARIABLE} too, where the list of processes does not show it. "
        "Whole numbers may be written 32k (32,000) or 32K (32,768).",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL",
                        help='"demo", a local folder, a .gguf file, or a Hugging Face name')  # fmt: skip
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the model, if not given without a flag")
    parser.add_argument("--config", metavar="FILE",
                        help="YAML with the names of flags as keys; the command line goes before it")  # fmt: skip
    own = flags()
    add_flags(parser, own)
    add_vllm_flags(parser, parser._option_string_actions)
    parser.set_defaults(run=serve, finish=_finish, parser=parser, flags=own)


def _finish(arguments: argparse.Namespace) -> None:
    """Adds what the file of options says, and finds the model."""
    options = read_options(arguments.config, arguments.flags) if arguments.config else {}
    models = list(dict.fromkeys(m for m in (arguments.model, arguments.model_flag) if m is not None))
    if len(models) > 1:
        arguments.parser.error(f"two models are given: {models[0]!r} and {models[1]!r}")
    if not models and "model" not in options:
        arguments.parser.error("MODEL is missing; after a flag that takes several values, it must come first")
    given = {**options, **vars(arguments)}
    vars(arguments).update(given, model=models[0] if models else options["model"])


def serve(arguments: argparse.Namespace) -> int:
    """Runs the server until a signal or the engine's end; the exit status."""
    config = engine_config_of(arguments)
    server_config = server_config_of(arguments, api_keys=_keys_of_environment())
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


def _keys_of_environment() -> list[str]:
    return [key for key in [os.environ.get(API_KEY_VARIABLE)] if key]


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
