"""`jaxpaged serve MODEL`: the HTTP server."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import uvicorn

from jaxpaged.config import EngineConfig
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.load import load_engine
from jaxpaged.errors import ConfigError
from jaxpaged.progress import ProgressBars
from server.app import create_app
from server.config import ServerConfig
from server.connection import uvicorn_options
from server.options import add_engine_flags, engine_config_of

API_KEY_VARIABLE = "JAXPAGED_API_KEY"
# Between the engine's death and the exit of the process: time for probes to read the 503.
SECONDS_TO_REPORT_DEATH = 2.0


def add_serve_command(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("serve", help="serve a model over HTTP, as OpenAI does", allow_abbrev=False)
    parser.add_argument("model", help='"demo", a local folder, a .gguf file, or a Hugging Face name')
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    group.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names that requests use (default: MODEL as given)"
    )
    group.add_argument(
        "--api-key", action="append", metavar="KEY", default=[],
        help=f"demand this key of clients; may be given several times. Also read from {API_KEY_VARIABLE}",
    )  # fmt: skip
    group.add_argument("--root-path", default="", help="path prefix that a proxy in front strips")
    group.add_argument("--shutdown-timeout", type=float, default=30.0, metavar="SECONDS",
                       help="how long SIGTERM waits for running requests (default: 30)")  # fmt: skip
    group.add_argument("--uvicorn-log-level", default="info", metavar="LEVEL",
                       choices=["critical", "error", "warning", "info", "debug", "trace"])  # fmt: skip
    group.add_argument("--disable-uvicorn-access-log", action="store_true", help="do not log each request")
    add_engine_flags(parser)
    parser.set_defaults(run=serve)


def serve(arguments: argparse.Namespace) -> int:
    """Runs the server until a signal or the engine's end; the exit status."""
    config = engine_config_of(arguments)
    with bind(arguments.host, arguments.port) as listener:  # before the weights: a taken port is found at once
        signal.signal(signal.SIGTERM, _raise_terminated)
        started = time.monotonic()
        with ProgressBars() as bars:
            engine, tokenizer = load_engine(config, bars.update)
        names = tuple(arguments.served_model_name or [arguments.model])
        server = DyingServer()
        llm = AsyncLLM(engine, tokenizer, on_death=server.engine_died)
        keys = arguments.api_key + [key for key in [os.environ.get(API_KEY_VARIABLE)] if key]
        server_config = ServerConfig(
            served_model_name=names,
            api_key=tuple(keys),
            root_path=arguments.root_path,
            shutdown_timeout=arguments.shutdown_timeout,
        )
        app = create_app(llm, server_config)
        _print_start_page(engine, names, listener, bool(keys), time.monotonic() - started)
        server.configure(
            uvicorn.Config(
                app,
                log_level=arguments.uvicorn_log_level,
                access_log=not arguments.disable_uvicorn_access_log,
                timeout_graceful_shutdown=max(1, round(arguments.shutdown_timeout)),
                **uvicorn_options(server_config),
            )
        )
        with contextlib.suppress(KeyboardInterrupt, _Terminated):  # uvicorn repeats the signal once it has drained
            server.run(listener)
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


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address.

    Raises:
      ConfigError: the port is taken, or the address is none of this machine's.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port={port} must be from 0 to 65535")
    listener: socket.socket | None = None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)  # a second server on this port must fail now, not when this one has loaded
    except OSError as e:
        if listener is not None:
            listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror or e}") from e
    return listener


def _print_start_page(
    engine: Engine, names: tuple[str, ...], listener: socket.socket, has_key: bool, seconds: float
) -> None:
    config: EngineConfig = engine.config
    host, port = listener.getsockname()[:2]
    blocks, length = config.num_kv_blocks or 0, config.max_model_len or 1
    tokens = blocks * config.block_size
    lines = [
        f"model        {config.model} ({config.dtype}), served as {', '.join(names)}",
        f"context      {length} tokens",
        f"KV cache     {blocks} blocks of {config.block_size} tokens: {tokens} tokens, "
        f"{tokens / length:.1f} requests of the full context",
        f"batch        up to {config.max_num_seqs} requests, {config.max_num_batched_tokens} tokens a step",
        f"programs     {engine.num_programs} compiled, ready after {seconds:.1f} s",
        f"listening    http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        + (" (with an API key)" if has_key else ""),
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)
