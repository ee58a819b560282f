"""The client of engine cores in processes of their own: starts them, talks to them, notices their death, ends them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import threading
from collections.abc import Callable

import msgspec
import zmq

from jaxpaged.config import EngineConfig
from jaxpaged.engine.core import PING
from jaxpaged.engine.core_child import CoreChild, end_all, exit_reason
from jaxpaged.engine.core_client import OnDeath, OnMessage
from jaxpaged.engine.core_devices import device_environment
from jaxpaged.engine.engine_facts import EngineFacts
from jaxpaged.engine.messages import (
    Abort,
    AddRequest,
    Call,
    Died,
    FromCore,
    Progress,
    Ready,
    StartFailed,
    ToCore,
    decode_from_core,
    encode,
)
from jaxpaged.engine.private_folder import PrivateFolder
from jaxpaged.engine.programs import Programs
from jaxpaged.engine.routing import Router
from jaxpaged.engine.sockets import core_socket, front_socket, listening, sending
from jaxpaged.engine.watchdog import Watchdog
from jaxpaged.errors import ConfigError, EngineDeadError, InvalidRequestError

logger = logging.getLogger(__name__)

ENGINE = "jaxpaged.engine.load:load_serving_engine"
MAX_CORES = 256  # an index is a byte

_PING_ID = -1  # of calls whose answers nobody waits for
_SECONDS_TO_REPORT = 2.0  # for the last words of a core that has exited to be read


class ProcessClient:
    """Engine cores in child processes, each with the whole model. Use `close` at the end.

    Attributes:
      num_cores: how many.
    """

    grammars = None  # the cores have compilers of their own

    def __init__(self, config: EngineConfig, *, num_cores: int = 1, engine: str = ENGINE, timeout: float | None = None):
        """Starts the cores; `wait_until_ready` returns when they can be used.

        Args:
          engine: "MODULE:NAME" of the function that makes a core's engine, with the arguments and result of
            `load_engine`.
          timeout: seconds after which a core that says nothing, and asks nothing, counts as dead. None: never.

        Raises:
          ConfigError: the config holds a function, or there are fewer devices than cores.
        """
        if not 1 <= num_cores <= MAX_CORES:
            raise ConfigError(f"data_parallel_size={num_cores} must be from 1 to {MAX_CORES}")
        options = _sendable(config)
        environments = [device_environment(i, num_cores, os.environ) for i in range(num_cores)]
        self.num_cores = num_cores
        self._config = config
        self._facts: EngineFacts | None = None
        self._programs: Programs | None = None
        self._router = Router(num_cores)
        self._lock = threading.Lock()  # of the sockets, and of who has died
        self._closed = False
        self._lost: dict[int, BaseException] = {}  # why each core that is gone is
        self._reported = [threading.Event() for _ in range(num_cores)]
        self._events: queue.SimpleQueue[tuple[int, FromCore | BaseException]] = queue.SimpleQueue()
        self._on_message: OnMessage = lambda core, message: self._events.put((core, message))
        self._on_death: OnDeath = lambda core, error: self._events.put((core, error))
        self._watchdog = None if timeout is None else Watchdog(num_cores, timeout, self._ping, self._fell_silent)
        self._folder, self._context = PrivateFolder(), zmq.Context()
        self._start_children(engine, options, environments)

    def _start_children(self, engine: str, options: bytes, environments: list[dict[str, str]]) -> None:
        cores = range(self.num_cores)
        self._outbound = [sending(self._context, core_socket(self._folder.path, i)) for i in cores]
        inbound = listening(self._context, front_socket(self._folder.path))
        self._reader = threading.Thread(target=self._read, args=(inbound,), name="jaxpaged-cores", daemon=True)
        self._reader.start()
        self._children = [CoreChild(i, self._folder.path, self._exited) for i in cores]
        try:
            for child, environment in zip(self._children, environments, strict=True):
                child.start(engine, options, environment)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the cores' processes."""
        return [child.pid for child in self._children]

    @property
    def facts(self) -> EngineFacts:
        """What is true of every core. Not before they are ready."""
        assert self._facts is not None, "not ready"
        return self._facts

    @property
    def programs(self) -> Programs:
        """What the first core had compiled when it was ready; the others do the same. Not before they are ready."""
        assert self._programs is not None, "not ready"
        return self._programs

    @property
    def is_alive(self) -> bool:
        return not self._closed and not self._lost

    def wait_until_ready(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Returns when every core has loaded its engine; `progress` is called as by `load_engine`, for the first core.

        Raises:
          ModelError, ConfigError, ...: what `load_engine` raised in a core.
          EngineDeadError: a core has ended.
        """
        ready: dict[int, Ready] = {}
        while len(ready) < self.num_cores:
            core, event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, StartFailed):
                raise event.failure.exception()
            if isinstance(event, Ready):
                ready[core] = event
            elif isinstance(event, Progress) and core == 0 and progress is not None:
                progress(event.stage, event.done, event.total)
        self._facts = _common(self._config, [event.facts for event in ready.values()])
        self._programs = ready[0].programs

    def start(self, on_message: OnMessage, on_death: OnDeath) -> None:
        with self._lock:
            self._on_message, self._on_death = on_message, on_death
            lost = dict(self._lost)
        for core, error in lost.items():
            on_death(core, error)
        if self._watchdog is not None:
            self._watchdog.start()

    def add(self, request: AddRequest) -> int:
        try:
            frame = encode(request)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
            raise InvalidRequestError(f"the request holds what cannot be sent to the engine: {error}") from error
        core = self._router.route(request.prompt_token_ids, request.cache_salt)
        try:
            self._send(core, frame)
        except BaseException:
            self._router.ended(core)
            raise
        return core

    def ended(self, core: int) -> None:
        self._router.ended(core)

    def abort(self, core: int, abort: Abort) -> None:
        self._send_if_alive(core, abort)

    def call(self, core: int, call: Call) -> None:
        self._send(core, encode(call))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for socket in self._outbound:
                socket.close(0)
        if self._watchdog is not None:
            self._watchdog.stop()
        for reported in self._reported:
            reported.set()  # nobody waits for last words any more
        end_all(self._children)
        if threading.current_thread() is self._reader:  # in `on_death`: it has to return before it can end
            threading.Thread(target=self._end_reader, name="jaxpaged-close", daemon=True).start()
        else:
            self._end_reader()

    def _end_reader(self) -> None:
        self._context.term()  # which ends it
        self._reader.join()
        self._folder.remove()

    def _send_if_alive(self, core: int, message: ToCore) -> None:
        with contextlib.suppress(EngineDeadError):  # it holds nothing any more
            self._send(core, encode(message))

    def _send(self, core: int, frame: bytes) -> None:
        with self._lock:
            if self._closed or core in self._lost:
                raise EngineDeadError("the engine is shutting down" if self._closed else str(self._lost[core]))
            self._outbound[core].send(frame, zmq.NOBLOCK)

    # Below, in threads of the client's.

    def _read(self, inbound: zmq.Socket) -> None:
        """The reader: takes what the cores send."""
        with inbound:
            inbound.linger = 0
            try:
                while True:
                    self._take(inbound.recv_multipart())
            except zmq.ContextTerminated:
                return
            except Exception as error:
                for core in range(self.num_cores):
                    self._lose(core, EngineDeadError(f"engine core {core} cannot be heard any more: {error!r}"))

    def _take(self, frames: list[bytes]) -> None:
        try:
            (index,), frame = frames
            message = decode_from_core(frame)
            if index >= self.num_cores:
                raise ValueError(f"there is no core {index}")
        except (ValueError, RecursionError) as error:  # DecodeError and UnicodeDecodeError are ValueErrors
            logger.error("dropped a message of %d bytes that is none of ours: %s", sum(map(len, frames)), error)
            return
        if self._watchdog is not None:
            self._watchdog.heard(index)
        if isinstance(message, Died):
            self._lose(index, EngineDeadError(message.message))
            self._reported[index].set()
            return
        try:
            self._on_message(index, message)
        except Exception:
            logger.exception("a message of engine core %d could not be handled", index)

    def _ping(self, core: int) -> None:
        self._send_if_alive(core, Call(_PING_ID, PING))

    def _fell_silent(self, core: int) -> None:
        self._lose(core, EngineDeadError(f"engine core {core} stands still: it has not answered for too long"))

    def _exited(self, core: int, status: int) -> None:
        if status >= 0 and not self._closed:  # then its last words may be on their way
            self._reported[core].wait(_SECONDS_TO_REPORT)
        self._lose(core, EngineDeadError(exit_reason(core, status)))

    def _lose(self, core: int, error: BaseException) -> None:
        with self._lock:
            if self._closed or core in self._lost:
                return
            self._lost[core] = error
            on_death = self._on_death
        on_death(core, error)


def _sendable(config: EngineConfig) -> bytes:
    """The options as a line of JSON.

    Raises:
      ConfigError: one is a function, which cannot be sent, or is of a wrong type.
    """
    if config.scheduling_key is not None:
        raise ConfigError(f"scheduling_key={config.scheduling_key!r} cannot be sent to another process")
    for processor in config.logits_processors:
        if not isinstance(processor, str):
            raise ConfigError(f"logits_processors holds {processor!r:.80}: another process needs MODULE:NAME")
    options = msgspec.json.encode(config)
    try:
        msgspec.json.decode(options, type=EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"an engine option is of the wrong type: {error}") from error
    return options


def _common(asked: EngineConfig, cores: list[EngineFacts]) -> EngineFacts:
    """What the front may count on: of what differs the least."""
    least = {name: min(getattr(facts.config, name) for facts in cores) for name in ("num_kv_blocks", "max_model_len")}
    config = dataclasses.replace(cores[0].config, logits_processors=asked.logits_processors, **least)
    return msgspec.structs.replace(cores[0], config=config)
