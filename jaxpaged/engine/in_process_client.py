"""The client of a core in this process: for embedding it, and for tests."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from typing import TYPE_CHECKING

from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.core_client import OnDeath, OnMessage
from jaxpaged.engine.engine_facts import EngineFacts
from jaxpaged.engine.engine_like import EngineLike
from jaxpaged.engine.messages import Abort, AddRequest, Call, ToCore
from jaxpaged.errors import EngineDeadError
from jaxpaged.text.grammar import GrammarCompiler

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SECONDS_TO_STOP = 30.0  # for the step under way


class InProcessClient:
    """One core in this process, in threads of its own."""

    num_cores = 1

    def __init__(self, engine: EngineLike, tokenizer: Tokenizer):
        """Args: engine: driven by a thread of the client's alone once it has started."""
        self._engine = engine
        self.grammars = GrammarCompiler(tokenizer, engine.vocab_size, engine.eos_token_ids)
        self._messages: queue.SimpleQueue[ToCore | None] = queue.SimpleQueue()
        self._input = threading.Thread(target=self._take_input, name="jaxpaged-input", daemon=True)
        self._loop = threading.Thread(target=self._run, name="jaxpaged-engine", daemon=True)
        self._gone: str | None = None  # why nothing can be sent any more

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts.of(self._engine)

    @property
    def is_alive(self) -> bool:
        return self._gone is None and self._loop.is_alive()

    def start(self, on_message: OnMessage, on_death: OnDeath) -> None:
        self._core = EngineCore(self._engine, self.grammars, functools.partial(on_message, 0))
        self._on_death = on_death
        self._input.start()
        self._loop.start()

    def add(self, request: AddRequest) -> int:
        self._put(request)
        return 0

    def ended(self, core: int) -> None:
        pass

    def abort(self, core: int, abort: Abort) -> None:
        with contextlib.suppress(EngineDeadError):  # it holds nothing any more
            self._put(abort)

    def call(self, core: int, call: Call) -> None:
        self._put(call)

    def close(self) -> None:
        self._gone = self._gone or "the engine is shutting down"
        if self._loop.ident is None:  # never started
            return
        self._messages.put(None)
        self._core.stop()
        for thread in (self._input, self._loop):
            if thread is not threading.current_thread():
                thread.join(_SECONDS_TO_STOP)
        if self._loop.is_alive() and self._loop is not threading.current_thread():
            logger.error("the engine's step does not end; it is left behind")

    def _put(self, message: ToCore) -> None:
        if self._gone is not None:
            raise EngineDeadError(self._gone)
        self._messages.put(message)

    def _take_input(self) -> None:
        while (message := self._messages.get()) is not None:
            self._core.receive(message)

    def _run(self) -> None:
        try:
            self._core.run()
        except BaseException as error:
            self._gone = f"the engine has failed: {error}"
            self._on_death(0, error)
