"""The front of an engine for asyncio: each request is an async stream of outputs.

The engine runs in its core, behind a client. What a request needs before it runs in threads of `Preparation`;
detokenizing, in the event loop that reads the stream, so that it overlaps the device's work on the next step.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from jaxpaged.config import EngineConfig
from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.snapshot import EngineSnapshot
from jaxpaged.engine.calls import Calls
from jaxpaged.engine.core_client import EngineCoreClient
from jaxpaged.engine.delivery import Delivery
from jaxpaged.engine.messages import Answer, FromCore, Refused, Updates
from jaxpaged.engine.observer import Observer, Observers
from jaxpaged.engine.output import RequestOutput
from jaxpaged.engine.preparation import Preparation, PreparedRequest
from jaxpaged.engine.stats import EngineStats
from jaxpaged.errors import EngineDeadError

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class AsyncLLM:
    """Serves an engine to coroutines. Use `shutdown` or `close` at the end.

    Its requests are read in one event loop at a time: another one may take over when no request is live, or when the
    one before it has been closed.

    Attributes:
      tokenizer: the model's tokenizer.
      error: what killed the engine; None while it lives.
      observers: are told what happens; more may be added.
    """

    def __init__(
        self,
        client: EngineCoreClient,
        tokenizer: Tokenizer,
        *,
        observer: Observer | None = None,
        on_death: Callable[[BaseException], None] | None = None,
    ):
        """Starts to talk to the engine's cores.

        Args:
          client: of the cores; closed with this.
          observer: is told what happens, in the event loop.
          on_death: called once if the engine fails, with what the first core has died of: in a thread of the client's,
            or in here if it is dead already.
        """
        self.tokenizer = tokenizer
        self.error: BaseException | None = None
        self.observers = Observers(*([] if observer is None else [observer]))
        self._client, self._on_death = client, on_death
        self._closing = False
        self._preparation = Preparation(client, tokenizer)
        self._delivery = Delivery(client, tokenizer, self.observers)
        self._calls = Calls(client, self._check_alive)
        self._dying = threading.Lock()  # several cores may fail at once
        client.start(self._receive, self._die)

    @property
    def config(self) -> EngineConfig:
        """The engine's resolved options."""
        return self._client.facts.config

    @property
    def vocab_size(self) -> int:
        """Prompts may hold ids below it."""
        return self._client.facts.vocab_size

    @property
    def is_healthy(self) -> bool:
        """Whether new requests will be served."""
        return self.error is None and not self._closing and self._client.is_alive

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and not yet ended."""
        return len(self._delivery.streams)

    @property
    def stats(self) -> list[EngineStats]:
        """The latest of each core."""
        return list(self._delivery.stats)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues a prompt, given as text or token ids. Leaving the loop early aborts the request.

        Args:
          cache_salt: shares cached blocks only with requests of the same salt.
          priority: smaller goes first, under the "priority" policy.

        Raises:
          InvalidRequestError: the prompt or the parameters are wrong.
          EngineDeadError: the engine has failed or is shutting down.
          RuntimeError: requests of another event loop are live.
        """
        prepared = await self.prepare(prompt, params, request_id, cache_salt=cache_salt, priority=priority)
        async with aclosing(self.stream(prepared)) as outputs:
            async for output in outputs:
                yield output

    async def prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        add_special_tokens: bool = True,
        cache_salt: str | None = None,
        priority: int = 0,
        pooling: PoolingParams | None = None,
    ) -> PreparedRequest:
        """Tokenizes and checks a request without starting it; arguments and errors as in `generate`.

        Args:
          add_special_tokens: let the tokenizer add its own (BOS, as a rule) to a text.
          pooling: for one vector of the prompt, instead of a continuation.
        """
        self._check_alive()
        return await self._preparation.request(
            prompt,
            params,
            request_id,
            add_special_tokens=add_special_tokens,
            cache_salt=cache_salt,
            priority=priority,
            pooling=pooling,
        )

    async def stream(self, prepared: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        """Submits a request and yields its outputs. A reader that is slow gets several deltas merged into one."""
        self._check_alive()
        stream = self._delivery.open(prepared)
        try:
            core = self._client.add(prepared.message)
            self._delivery.sent(prepared, stream, core)
            self._check_alive()  # whatever ended since the first check, in another thread, may have missed this stream
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._delivery.forget(prepared.request.request_id)

    def abort(self, request_id: str) -> int:
        """Ends all live requests that carry this id, with finish_reason "abort". Returns how many.

        A request that is submitted later under the same id is not touched.
        """
        return self._delivery.abort_all(request_id)

    async def render_chat(self, messages: Sequence[Any], /, **options: Any) -> list[int]:
        """`text.chat.render_chat` off the event loop."""
        return await self._preparation.render_chat(messages, **options)

    async def prompt_text(self, prepared: PreparedRequest, *, as_given: bool = True) -> tuple[str, list[int]]:
        """`text.detokenizer.prompt_text` off the event loop.

        Args:
          as_given: of a prompt that was given as text, the whole of it; False: only what its tokens spell.
        """
        return await self._preparation.prompt_text(prepared, as_given=as_given)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text, off the event loop."""
        return await self._preparation.encode(text, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, off the event loop.

        Raises:
          InvalidRequestError: one is outside the vocabulary.
        """
        return await self._preparation.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix. Live requests go on."""
        await self._calls.every_core("reset_prefix_cache")

    async def snapshot(self) -> list[EngineSnapshot]:
        """What each core holds, between two of its steps."""
        return await self._calls.every_core("snapshot")

    async def start_profile(self, folder: str) -> None:
        """Records what the device does; of several cores, each into a folder of its own there. All do, or none."""
        count = self._client.num_cores
        folders = [folder] if count == 1 else [os.path.join(folder, f"core-{i}") for i in range(count)]
        calls = (self._calls.one(i, "start_profile", folder) for i, folder in enumerate(folders))
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = {i: result for i, result in enumerate(results) if isinstance(result, BaseException)}
        if errors:  # the others would go on
            others = (self._calls.one(i, "stop_profile") for i in range(count) if i not in errors)
            await asyncio.gather(*others, return_exceptions=True)
            raise next(iter(errors.values()))

    async def stop_profile(self) -> None:
        """Writes the record to its folder."""
        await self._calls.every_core("stop_profile")

    async def shutdown(self, timeout: float | None = 30.0) -> None:
        """Refuses new requests, waits up to `timeout` seconds for live ones, aborts the rest, ends the cores."""
        self._closing = True
        self._delivery.forget_orphans()
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while self.num_unfinished and self.error is None and (deadline is None or loop.time() < deadline):
            await asyncio.sleep(0.02)
        self.abort_all()
        await asyncio.sleep(0)  # let their readers see it
        await loop.run_in_executor(None, self.close)

    def abort_all(self) -> None:
        """Ends all live requests, with finish_reason "abort", and refuses new ones. Call it in the event loop."""
        self._closing = True
        self._delivery.abort_all()
        self._calls.fail_all(EngineDeadError("the engine is shutting down"))

    def close(self) -> None:
        """Ends the cores; requests that are still live fail."""
        self._closing = True
        self._preparation.close()
        self._client.close()
        self._delivery.forget_orphans()
        self._fail_all(EngineDeadError("the engine was shut down"))

    def _check_alive(self) -> None:
        if not self.is_healthy:
            raise self._dead_error()

    def _dead_error(self) -> EngineDeadError:
        error = EngineDeadError(
            f"the engine has failed: {self.error}" if self.error is not None else "the engine is shutting down"
        )
        error.__cause__ = self.error
        return error

    # Below, in threads of the client's.

    def _receive(self, core: int, message: FromCore) -> None:
        if isinstance(message, Updates):
            self._delivery.receive_updates(core, message)
        elif isinstance(message, Refused):
            self._delivery.receive_refusal(message)
        elif isinstance(message, Answer):
            self._calls.answer(message)

    def _die(self, core: int, error: BaseException) -> None:
        with self._dying:
            first, self.error = self.error is None, self.error or error
        logger.critical("engine core %d has failed; its requests fail with it", core, exc_info=error)
        self._fail_all(self._dead_error(), core)
        if first and self._on_death is not None:
            self._on_death(error)

    def _fail_all(self, error: EngineDeadError, core: int | None = None) -> None:
        self._delivery.fail_all(error, core)
        self._calls.fail_all(error)
