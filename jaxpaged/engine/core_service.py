"""What a core's process does: it loads the engine, tells how that goes, and then runs the core between its sockets."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from jaxpaged.config import EngineConfig
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.engine_like import EngineLike
from jaxpaged.engine.messages import (
    Died,
    Failure,
    FromCore,
    Progress,
    Ready,
    StartFailed,
    broken_request,
    decode_to_core,
    encode,
)
from jaxpaged.engine.sockets import core_socket, front_socket, listening, sending
from jaxpaged.errors import EngineDeadError, InvalidRequestError, JaxPagedError
from jaxpaged.text.grammar import GrammarCompiler

logger = logging.getLogger(__name__)

_NOT_SENT = ("scheduling_key", "logits_processors")  # options that may hold functions
_SECONDS_TO_FLUSH = 5.0
_SECONDS_BETWEEN_PROGRESS = 0.1


def serve_core(config: EngineConfig, engine: str, folder: Path, index: int) -> None:
    """Returns when the engine has failed, or has not started, and that has been said.

    Args:
      engine: "MODULE:NAME" of the function that makes the engine.
      folder: where the sockets are.
      index: of this core.
    """
    output = Output(folder, index)
    core = _start(config, engine, folder, index, output)
    if core is not None:
        _run(core, output)
    output.close()


def _start(config: EngineConfig, engine: str, folder: Path, index: int, output: Output) -> EngineCore | None:
    """Loads the engine and listens for its work, and says so; or says why not."""
    try:
        core, ready = _load(config, engine, output)
        gc.collect()
        gc.freeze()  # what is there now stays: no collection need look at it again
        Input(folder, index, core).start()  # it listens before that is said
    except JaxPagedError as error:
        output.put(StartFailed(Failure.of(error)))
        return None
    except Exception as error:
        logger.critical("the engine does not start", exc_info=error)
        output.put(StartFailed(Failure.of(EngineDeadError(f"the engine does not start: {error!r}"))))
        return None
    output.put(ready)
    return core


def _load(config: EngineConfig, name: str, output: Output) -> tuple[EngineCore, Ready]:
    module, _, function = name.partition(":")
    load: Callable[[EngineConfig, Any], tuple[EngineLike, Any]] = getattr(importlib.import_module(module), function)
    engine, tokenizer = load(config, output.progress)
    core = EngineCore(engine, GrammarCompiler(tokenizer, engine.vocab_size, engine.eos_token_ids), output.put)
    core.prepare()
    resolved = {f.name: getattr(engine.config, f.name) for f in dataclasses.fields(EngineConfig)}
    told = {name: value for name, value in resolved.items() if name not in _NOT_SENT}
    return core, Ready(
        told, engine.vocab_size, list(engine.eos_token_ids), engine.num_programs, engine.hidden_size, engine.pooling
    )


def _run(core: EngineCore, output: Output) -> None:
    try:
        core.run()
    except BaseException as error:
        logger.critical("the engine has failed", exc_info=error)
        output.put(Died(f"{type(error).__name__}: {error}"))


class Output:
    """The output thread: sends what is put, in order."""

    def __init__(self, folder: Path, index: int):
        self._messages: queue.SimpleQueue[FromCore | None] = queue.SimpleQueue()
        self._path, self._index = front_socket(folder), bytes([index])
        self._last_progress = 0.0
        self._thread = threading.Thread(target=self._run, name="jaxpaged-output", daemon=True)
        self._thread.start()

    def put(self, message: FromCore) -> None:
        """May be called in any thread."""
        self._messages.put(message)

    def progress(self, stage: str, done: int, total: int) -> None:
        """The argument `progress` of `load_engine`."""
        now = time.monotonic()
        if done >= total or done == 0 or now - self._last_progress >= _SECONDS_BETWEEN_PROGRESS:
            self._last_progress = now
            self.put(Progress(stage, done, total))

    def close(self) -> None:
        """Returns when all has been sent."""
        self._messages.put(None)
        self._thread.join(_SECONDS_TO_FLUSH)

    def _run(self) -> None:
        try:
            self._send_all()
        except Exception as error:  # nothing that the core says would be heard any more
            logger.critical("the output of the engine core has failed", exc_info=error)
            os._exit(1)

    def _send_all(self) -> None:
        with zmq.Context() as context, sending(context, self._path) as socket:
            socket.linger = int(_SECONDS_TO_FLUSH * 1000)  # the context's end waits until everything is out
            while (message := self._messages.get()) is not None:
                socket.send_multipart((self._index, encode(message)))


class Input(threading.Thread):
    """The input thread: hands what comes to the core."""

    def __init__(self, folder: Path, index: int, core: EngineCore):
        super().__init__(name="jaxpaged-input", daemon=True)
        self._core = core
        self._socket = listening(zmq.Context(), core_socket(folder, index))

    def run(self) -> None:
        try:
            while True:
                self._take(self._socket.recv())
        except Exception as error:  # nothing that the front says would be heard any more
            logger.critical("the input of the engine core has failed", exc_info=error)
            os._exit(1)

    def _take(self, frame: bytes) -> None:
        try:
            message = decode_to_core(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            logger.error("dropped a message of %d bytes that is none of ours: %s", len(frame), error)
            if (request_id := broken_request(frame)) is not None:  # its reader waits
                self._core.refuse(request_id, InvalidRequestError(f"the engine core cannot read the request: {error}"))
            return
        self._core.receive(message)
