"""How the front of an engine reaches its cores: the protocol, and the client of a core in this process."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from jaxpaged.config import EngineConfig
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.engine_like import EngineLike
from jaxpaged.engine.messages import Abort, AddRequest, Call, FromCore, ToCore
from jaxpaged.errors import EngineDeadError
from jaxpaged.text.grammar import GrammarCompiler

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

OnMessage = Callable[[int, FromCore], None]
"""Takes a message of a core, whose index it is given. Called in threads of the client's."""
OnDeath = Callable[[int, BaseException], None]
"""Is told which core has died, and of what. Called once for each core that dies, in a client thread, or inside `start`
for a core already lost."""

_SECONDS_TO_STOP = 30.0  # for the step under way


class EngineCoreClient(Protocol):
    """One engine core or several: where requests are sent to. Its methods may be called in any thread."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def hidden_size(self) -> int:
        """Numbers of a whole embedding."""
        ...

    @property
    def pooling(self) -> str:
        """How the model makes one; see `checkpoint.pooling`."""
        ...

    @property
    def num_programs(self) -> int: ...
    @property
    def num_cores(self) -> int: ...
    @property
    def is_alive(self) -> bool:
        """Whether every core can take requests."""
        ...

    @property
    def grammars(self) -> GrammarCompiler | None:
        """The core's compiler of grammars, if the front can have it too; else it makes its own."""
        ...

    def start(self, on_message: OnMessage, on_death: OnDeath) -> None:
        """Called once, before anything is sent."""
        ...

    def add(self, request: AddRequest) -> int:
        """Sends a request to a core. Returns its index.

        Raises:
          InvalidRequestError: it holds what cannot be sent.
          EngineDeadError: the core is gone.
        """
        ...

    def ended(self, core: int) -> None:
        """A request that `add` sent there has ended, or nobody waits for it any more."""
        ...

    def abort(self, core: int, abort: Abort) -> None: ...
    def call(self, core: int, call: Call) -> None: ...
    def close(self) -> None:
        """Ends the cores. Nothing is received afterwards.

        Processes end within seconds, whatever they do; a core in this one is left behind if its step does not end.
        """
        ...


class InProcessClient:
    """One core in this process, in threads of its own: for embedding it, and for tests."""

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
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._engine.eos_token_ids

    @property
    def hidden_size(self) -> int:
        return self._engine.hidden_size

    @property
    def pooling(self) -> str:
        return self._engine.pooling

    @property
    def num_programs(self) -> int:
        return self._engine.num_programs

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
