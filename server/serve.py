"""`jaxpaged serve MODEL`: the HTTP server.

The engine's process is started before anything else: what takes its time to import is imported meanwhile.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxpaged.config import EngineConfig
from jaxpaged.engine.process_client import ProcessClient
from jaxpaged.progress import ProgressBars
from server.config import ServerConfig
from server.listen import Listener
from server.start_page import start_page
from server.watch.log_format import configure_logging

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer


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
            # While the engine loads. What is imported here takes as long as a good part of that.
            from server.generation_defaults import resolve_generation
            from server.http_server import HTTPServer

            tokenizer, generation = open_front(config)
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
        server = HTTPServer(client, tokenizer, server_config)
        print(page, file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt, _Terminated):  # uvicorn repeats the signal once it has drained
            server.run(listener.opened())
        return 1 if server.error is not None else 0


def open_front(config: EngineConfig) -> tuple[Tokenizer, Mapping[str, Any]]:
    """What this process needs of a model: its tokenizer, and what its generation_config.json says."""
    from jaxpaged.checkpoint.source import open_model
    from jaxpaged.text.tokenizer import Tokenizer

    source = open_model(config.model, load_format="dummy")  # the weights are for the engine's process
    tokenizer = Tokenizer.from_name(config.tokenizer) if config.tokenizer else Tokenizer.from_source(source)
    _ = tokenizer.hf  # imports transformers now, rather than at the first chat
    return tokenizer, source.generation_config


class _Terminated(SystemExit):
    """SIGTERM came."""


def _raise_terminated(signum: int, _: Any) -> None:
    raise _Terminated(128 + signum)
