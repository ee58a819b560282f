"""The core of a serving engine: the loop that steps it, with messages in and out. It never sees a text."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from jaxpaged.core.request import Grammar, Request
from jaxpaged.core.step import RequestUpdate
from jaxpaged.engine.engine_like import EngineLike
from jaxpaged.engine.messages import Abort, AddRequest, Answer, Call, Failure, FromCore, Refused, ToCore, Updates
from jaxpaged.errors import JaxPagedError, UnsupportedError

if TYPE_CHECKING:
    from jaxpaged.text.grammar import GrammarCompiler

logger = logging.getLogger(__name__)

CALLS = frozenset({"reset_prefix_cache", "snapshot", "start_profile", "stop_profile"})
"""Methods of the engine that may be called by name."""

IDLE_SECONDS = 1.0
"""How long there is nothing to compute before the engine uses the time."""

PING = "ping"
"""The call that only wants an answer."""


class EngineCore:
    """Drives an engine: one thread calls `receive`, another one `run`. Running requests wait for neither.

    What takes time before a request can start happens in the first thread, and the compiling of a grammar that is not
    known yet in one of its own.
    """

    def __init__(self, engine: EngineLike, grammars: GrammarCompiler, send: Callable[[FromCore], None]):
        """Args: send: takes a message for the front; called by `receive`, by `run` and where grammars are compiled."""
        self._engine, self._grammars, self._send = engine, grammars, send
        self._inbox: queue.SimpleQueue[Request | Abort | Call | None] = queue.SimpleQueue()
        self._grammar_pool = ThreadPoolExecutor(1, thread_name_prefix="jaxpaged-core-grammar")
        self._lock = threading.Lock()  # so that an abort comes either before or after what waits for a grammar is added
        self._compiling: set[str] = set()  # requests that wait for their grammar
        self._stopped = False
        self._may_use_idle_time, self._idle_since = True, time.monotonic()

    def prepare(self) -> None:
        """Builds what all grammars share, meanwhile: later it would hold up running requests."""
        self._grammar_pool.submit(self._grammars.prepare, start_checker=False)

    def receive(self, message: ToCore) -> None:
        """Takes a message of the front, of any kind."""
        if isinstance(message, AddRequest):
            self._begin(message)
            return
        with self._lock:
            if isinstance(message, Abort):
                self._compiling.discard(message.request_id)
            self._inbox.put(message)

    def refuse(self, request_id: str, error: Exception) -> None:
        """Tells the front why a request does not start."""
        if self._stopped:
            return
        if not isinstance(error, JaxPagedError):
            logger.error("request %s could not be started", request_id, exc_info=error)
        self._send(Refused(request_id, Failure.of(error)))

    def run(self) -> None:
        """The busy loop: until `stop`, or until the engine fails, with what it raises."""
        while self._take_messages():
            updates: list[RequestUpdate] = []
            if self._engine.has_work:
                updates = self._engine.step()
                self._idle_since = time.monotonic()
            self._send(Updates(updates, self._engine.stats, time.monotonic()))

    def stop(self) -> None:
        """Ends `run` after the present step, and the compiling of grammars at once."""
        self._stopped = True
        self._inbox.put(None)
        self._grammars.close()
        self._grammar_pool.shutdown(wait=False, cancel_futures=True)

    # Below, before a request starts.

    def _begin(self, message: AddRequest) -> None:
        wanted, ignore_eos = message.params.structured_outputs, message.params.ignore_eos
        try:
            grammar = None if wanted is None else self._grammars.find(wanted, ignore_eos=ignore_eos)
            if wanted is None or grammar is not None:
                self._inbox.put(self._make(message, grammar))
                return
            self._compiling.add(message.request_id)
            self._grammar_pool.submit(self._compile, message)
        except Exception as error:
            self.refuse(message.request_id, error)

    def _compile(self, message: AddRequest) -> None:
        wanted = message.params.structured_outputs
        assert wanted is not None
        try:
            if message.request_id not in self._compiling:
                return
            request = self._make(message, self._grammars.compile(wanted, ignore_eos=message.params.ignore_eos))
            with self._lock:
                if message.request_id in self._compiling:  # else it has been aborted meanwhile
                    self._compiling.remove(message.request_id)
                    self._inbox.put(request)
        except Exception as error:
            self._compiling.discard(message.request_id)
            self.refuse(message.request_id, error)

    def _make(self, message: AddRequest, grammar: Grammar | None) -> Request:
        return self._engine.make_request(
            message.request_id,
            message.prompt_token_ids,
            message.params,
            cache_salt=message.cache_salt,
            priority=message.priority,
            bad_word_ids=message.bad_word_ids,
            grammar=grammar,
            pooling=message.pooling,
            arrival_time=message.arrival_time,
        )

    # Below, in the busy loop.

    def _take_messages(self) -> bool:
        """Does what the front asked for; waits for it if there is nothing else to do. False: stop."""
        idle = not self._engine.has_work
        while True:
            try:
                message = self._wait() if idle else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if message is None:
                return False
            self._handle(message)
            idle = False

    def _wait(self) -> Request | Abort | Call | None:
        """The next message, whenever it comes. Each second without a step is used, whoever asks for news meanwhile."""
        while self._may_use_idle_time:
            left = self._idle_since + IDLE_SECONDS - time.monotonic()
            try:
                return self._inbox.get(timeout=max(0.0, left))
            except queue.Empty:
                self._may_use_idle_time = self._engine.use_idle_time()
                self._idle_since = time.monotonic()
        return self._inbox.get()

    def _handle(self, message: Request | Abort | Call) -> None:
        if isinstance(message, Request):
            try:
                self._engine.add_request(message)
            except Exception as error:
                self.refuse(message.request_id, error)
        elif isinstance(message, Abort):
            self._engine.abort(message.request_id, message.index)
        else:
            self._send(self._answer(message))

    def _answer(self, call: Call) -> Answer:
        if call.method == PING:
            return Answer(call.call_id)
        method = getattr(self._engine, call.method, None) if call.method in CALLS else None
        try:
            if method is None:
                raise UnsupportedError(f"this engine has no {call.method}")
            return Answer(call.call_id, method(*call.arguments))
        except Exception as error:
            if not isinstance(error, JaxPagedError):
                logger.error("%s failed", call.method, exc_info=error)
            return Answer(call.call_id, failure=Failure.of(error))
