"""A core's ends of the sockets, each with a thread of its own: what it says to the front, and what it hears."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from pathlib import Path

import msgspec
import zmq

from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.messages import FromCore, Progress, broken_request, decode_to_core, encode
from jaxpaged.engine.sockets import core_socket, front_socket, listening, sending
from jaxpaged.errors import InvalidRequestError

logger = logging.getLogger(__name__)

_SECONDS_TO_FLUSH = 5.0
_SECONDS_BETWEEN_PROGRESS = 0.1


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
