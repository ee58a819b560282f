"""The engine for asyncio: a thread runs its loop, and each request is an async stream of outputs.

The engine thread only schedules and launches. What a request needs before it runs in other threads; detokenizing, in
the event loop that reads the stream, so that it overlaps the device's work on the next step.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from jaxpaged.config import EngineConfig
from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import RequestUpdate
from jaxpaged.engine.engine_like import EngineLike
from jaxpaged.engine.output import RequestOutput
from jaxpaged.engine.output_processor import OutputProcessor
from jaxpaged.engine.output_stream import OutputStream
from jaxpaged.engine.preparation import Preparation, PreparedRequest
from jaxpaged.errors import EngineDeadError

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class AsyncLLM:
    """Serves one engine to coroutines. Use `shutdown` or `close` at the end.

    Attributes:
      tokenizer: the model's tokenizer.
      error: what killed the engine; None while it lives.
    """

    def __init__(
        self, engine: EngineLike, tokenizer: Tokenizer, *, on_death: Callable[[BaseException], None] | None = None
    ):
        """Starts the engine thread.

        Args:
          engine: driven by that thread alone from now on.
          on_death: called once, in the engine thread, if the engine fails.
        """
        self.tokenizer = tokenizer
        self.error: BaseException | None = None
        self._engine, self._on_death = engine, on_death
        self._processor = OutputProcessor(tokenizer, in_slices=True)
        self._behind: dict[asyncio.AbstractEventLoop, deque[str]] = {}  # ids that wait for `_describe`
        self._streams: dict[str, OutputStream] = {}  # by internal id
        self._closing = False
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._preparation = Preparation(engine, tokenizer)
        self._thread = threading.Thread(target=self._run, name="jaxpaged-engine", daemon=True)
        self._thread.start()

    @property
    def config(self) -> EngineConfig:
        """The engine's resolved options."""
        return self._engine.config

    @property
    def is_healthy(self) -> bool:
        """Whether new requests will be served."""
        return self.error is None and not self._closing and self._thread.is_alive()

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and not yet ended."""
        return len(self._streams)

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
    ) -> PreparedRequest:
        """Tokenizes and checks a request without starting it; arguments and errors as in `generate`.

        Args:
          add_special_tokens: let the tokenizer add its own (BOS, as a rule) to a text.
        """
        self._check_alive()
        return await self._preparation.request(
            prompt,
            params,
            request_id,
            add_special_tokens=add_special_tokens,
            cache_salt=cache_salt,
            priority=priority,
        )

    async def render_chat(self, messages: Sequence[Any], /, **options: Any) -> list[int]:
        """`text.chat.render_chat` off the event loop."""
        return await self._preparation.render_chat(messages, **options)

    async def prompt_text(self, prepared: PreparedRequest, *, as_given: bool = True) -> tuple[str, list[int]]:
        """`text.detokenizer.prompt_text` off the event loop.

        Args:
          as_given: of a prompt that was given as text, the whole of it; False: only what its tokens spell.
        """
        return await self._preparation.prompt_text(prepared, as_given=as_given)

    async def stream(self, prepared: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        """Submits a request and yields its outputs. A reader that is slow gets several deltas merged into one."""
        self._check_alive()
        request = prepared.request
        merge = request.params.output_kind == "delta"
        stream = OutputStream(prepared.external_id, asyncio.get_running_loop(), merge=merge)
        self._processor.add(request, prepared.prompt, prepared.prompt_offsets)
        self._streams[request.request_id] = stream
        self._inbox.put(lambda: self._add(request))
        try:
            self._check_alive()  # whatever ended since the first check, in another thread, may have missed this stream
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._forget(request.request_id)

    def abort(self, request_id: str) -> int:
        """Ends all live requests that carry this id, with finish_reason "abort". Returns how many.

        A request that is submitted later under the same id is not touched.
        """
        named = [(i, stream) for i, stream in list(self._streams.items()) if stream.external_id == request_id]
        for internal_id, stream in named:
            stream.call(functools.partial(self._deliver_abort, internal_id))
        return len(named)

    async def shutdown(self, timeout: float | None = 30.0) -> None:
        """Refuses new requests, waits up to `timeout` seconds for live ones, aborts the rest, stops the thread."""
        self._closing = True
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while self._streams and self.error is None and (deadline is None or loop.time() < deadline):
            await asyncio.sleep(0.02)
        for internal_id, stream in list(self._streams.items()):
            stream.call(functools.partial(self._deliver_abort, internal_id))
        await asyncio.sleep(0)  # let their readers see it
        await loop.run_in_executor(None, self.close)

    def close(self) -> None:
        """Stops the threads after the current step; requests that are still live fail."""
        self._closing = True
        self._preparation.close()
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._fail_all(EngineDeadError("the engine was shut down"))

    # Below, in the event loop's thread.

    def _check_alive(self) -> None:
        if not self.is_healthy:
            raise self._dead_error()

    def _dead_error(self) -> EngineDeadError:
        error = EngineDeadError(
            f"the engine has failed: {self.error!r}" if self.error is not None else "the engine is shutting down"
        )
        error.__cause__ = self.error
        return error

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        self._hand_out(*self._processor.process(updates))
        behind = [u.request_id for u in updates if u.prompt_logprobs]
        if behind:
            loop = asyncio.get_running_loop()
            if loop not in self._behind:
                self._behind[loop] = deque()
                loop.call_soon(self._describe, loop)
            self._behind[loop] += behind

    def _describe(self, loop: asyncio.AbstractEventLoop) -> None:
        """Describes a slice of prompt log-probabilities; before the next one others have their turn."""
        behind = self._behind[loop]
        self._hand_out(*self._processor.describe(behind[0]))
        if not self._processor.is_behind(behind[0]):
            behind.popleft()
        if behind:
            loop.call_soon(self._describe, loop)
        else:
            del self._behind[loop]

    def _hand_out(self, outputs: list[RequestOutput], to_abort: list[tuple[str, int | None]]) -> None:
        for internal_id, index in to_abort:
            self._abort_in_engine(internal_id, index)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                self._put(stream, output, output.request_id)

    def _deliver_abort(self, internal_id: str) -> None:
        output = self._processor.abort(internal_id)
        stream = self._streams.get(internal_id)
        if output is not None and stream is not None:
            self._put(stream, output, internal_id)
            self._abort_in_engine(internal_id)

    def _put(self, stream: OutputStream, output: RequestOutput, internal_id: str) -> None:
        output.request_id = stream.external_id
        stream.put(output)
        if output.finished:
            self._streams.pop(internal_id, None)

    def _forget(self, internal_id: str) -> None:
        """Ends a request that nobody reads any more; does nothing to one that has ended."""
        if self._streams.pop(internal_id, None) is not None:
            self._processor.abort(internal_id)
            self._abort_in_engine(internal_id)

    def _abort_in_engine(self, internal_id: str, index: int | None = None) -> None:
        self._inbox.put(lambda: self._drop(internal_id, index))

    # Below, in the engine thread.

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._engine.has_work:
                    updates = self._engine.step()
                    if updates:
                        self._send(updates)
        except BaseException as e:
            self._die(e)

    def _take_commands(self) -> bool:
        """Runs what the event loops asked for; waits for it if there is nothing else to do. False: stop."""
        while True:
            try:
                command = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _add(self, request: Request) -> None:
        try:
            self._engine.add_request(request)
        except Exception as e:
            stream = self._streams.get(request.request_id)
            if stream is not None:
                stream.call(functools.partial(stream.fail, e))

    def _drop(self, internal_id: str, index: int | None) -> None:
        self._engine.abort(internal_id, index)

    def _send(self, updates: list[RequestUpdate]) -> None:
        """Hands updates to the event loops of their readers: one loop, as a rule."""
        by_loop: dict[asyncio.AbstractEventLoop, list[RequestUpdate]] = {}
        for update in updates:
            stream = self._streams.get(update.request_id)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append(update)
        for loop, theirs in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._deliver, theirs)
            except RuntimeError:  # that loop has been closed, its readers are gone
                for update in theirs:
                    self._forget(update.request_id)

    def _die(self, error: BaseException) -> None:
        self.error = error
        logger.critical("the engine has failed; every request fails with it", exc_info=error)
        self._fail_all(self._dead_error())
        if self._on_death is not None:
            self._on_death(error)

    def _fail_all(self, error: EngineDeadError) -> None:
        for stream in list(self._streams.values()):
            stream.call(functools.partial(stream.fail, error))
