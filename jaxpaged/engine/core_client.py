"""How the front of an engine reaches its cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from jaxpaged.engine.engine_facts import EngineFacts
from jaxpaged.engine.messages import Abort, AddRequest, Call, FromCore

if TYPE_CHECKING:
    from jaxpaged.text.grammar import GrammarCompiler

OnMessage = Callable[[int, FromCore], None]
"""Takes a message of a core, whose index it is given. Called in threads of the client's."""
OnDeath = Callable[[int, BaseException], None]
"""Is told which core has died, and of what. Called once for each core that dies, in a client thread, or inside `start`
for a core already lost."""


class EngineCoreClient(Protocol):
    """One engine core or several: where requests are sent to. Its methods may be called in any thread."""

    @property
    def facts(self) -> EngineFacts:
        """Of the engines, once they are ready."""
        ...

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
