"""From the cores' messages to the readers of the requests: detokenizing happens here, in the readers' event loop."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from typing import TYPE_CHECKING

from jaxpaged.engine.core_client import EngineCoreClient
from jaxpaged.engine.messages import Abort, Refused, Updates
from jaxpaged.engine.observer import Observers, RequestEnd, WatchedRequest
from jaxpaged.engine.output import RequestOutput
from jaxpaged.engine.output_processor import OutputProcessor
from jaxpaged.engine.output_stream import OutputStream
from jaxpaged.engine.preparation import PreparedRequest
from jaxpaged.engine.stats import EngineStats
from jaxpaged.errors import EngineDeadError

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer


class Delivery:
    """The live requests of a front, and what is on its way to their readers, who are in one event loop at a time.

    Attributes:
      streams: of the live requests, by internal id.
      stats: the latest of each core.
    """

    def __init__(self, client: EngineCoreClient, tokenizer: Tokenizer, observers: Observers):
        self.streams: dict[str, OutputStream] = {}
        self.stats = [EngineStats() for _ in range(client.num_cores)]
        self._client, self._observers = client, observers
        self._processor = OutputProcessor(tokenizer, in_slices=True)
        self._behind: deque[str] = deque()  # ids that wait for `_describe`
        self._loop: asyncio.AbstractEventLoop | None = None  # the readers'

    # Below, called in any thread.

    def receive_updates(self, core: int, message: Updates) -> None:
        """Hands a step's updates to the event loop of their readers."""
        self.stats[core] = message.stats
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver, core, message)
        except RuntimeError:  # it has been closed, the readers are gone; `forget_orphans` does the rest
            for update in message.updates:
                self._abort_in_core(update.request_id)

    def receive_refusal(self, message: Refused) -> None:
        """Tells a reader why a core did not start the request."""
        stream = self.streams.get(message.request_id)
        if stream is not None:
            error = message.failure.exception()
            stream.call(functools.partial(self._fail, message.request_id, error, []))

    def fail_all(self, error: EngineDeadError, core: int | None = None) -> None:
        """Ends all requests, or those of one core, with an error."""
        for internal_id, stream in list(self.streams.items()):
            if core is None or (stream.watched is not None and stream.watched.core_index == core):
                stream.call(functools.partial(self._fail, internal_id, error, ["error"]))

    def abort_all(self, external_id: str | None = None) -> int:
        """Aborts the requests of an id, or all. Returns how many."""
        named = [(i, s) for i, s in list(self.streams.items()) if external_id in (None, s.external_id)]
        for internal_id, stream in named:
            stream.call(functools.partial(self._deliver_abort, internal_id))
        return len(named)

    # Below, in the event loop of the readers.

    def open(self, prepared: PreparedRequest) -> OutputStream:
        """Starts to follow a request, before it is sent.

        Raises:
          RuntimeError: requests of another event loop are live.
        """
        request, loop = prepared.request, asyncio.get_running_loop()
        if loop is not self._loop:
            self._take_over(loop)
        merge = request.params.output_kind == "delta"
        stream = OutputStream(prepared.external_id, loop, request.arrival_time, merge=merge)
        self._processor.add(request, prepared.prompt, prepared.prompt_offsets)
        self.streams[request.request_id] = stream
        return stream

    def sent(self, prepared: PreparedRequest, stream: OutputStream, core: int) -> None:
        """The request has been given to a core."""
        request = prepared.request
        stream.watched = WatchedRequest(prepared.external_id, request.num_prompt_tokens, request.params, core)
        self._observers.on_added(stream.watched)

    def forget(self, internal_id: str) -> None:
        """Ends a request that nobody reads any more; does nothing to one that has ended."""
        stream = self.streams.get(internal_id)
        if stream is not None:
            output = self._processor.abort(internal_id)
            if output is not None:
                stream.note(output)
            self._abort_in_core(internal_id)
            self._end(internal_id)

    def forget_orphans(self) -> None:
        """Ends the requests of an event loop that has been closed: nobody reads them any more."""
        if self._loop is not None and self._loop.is_closed():
            for internal_id in list(self.streams):
                self.forget(internal_id)

    def _take_over(self, loop: asyncio.AbstractEventLoop) -> None:
        self.forget_orphans()
        if self.streams:
            raise RuntimeError(
                f"{len(self.streams)} requests are read in another event loop: an AsyncLLM serves one at a time"
            )
        self._loop, self._behind = loop, deque()

    def _deliver(self, core: int, message: Updates) -> None:
        if asyncio.get_running_loop() is not self._loop:
            return  # another one has taken over while this was on its way
        outputs, to_abort, tokens = self._processor.process(message.updates, message.time)
        self._observers.on_step(core, message.stats, tokens)
        self._hand_out(outputs, to_abort)
        behind = [update.request_id for update in message.updates if update.prompt_logprobs]
        if behind and not self._behind:
            asyncio.get_running_loop().call_soon(self._describe)
        self._behind += behind

    def _describe(self) -> None:
        """Describes a slice of prompt log-probabilities; before the next one others have their turn."""
        if asyncio.get_running_loop() is not self._loop:
            return
        first = self._behind[0]
        self._hand_out(*self._processor.describe(first))
        if not self._processor.is_behind(first):
            self._behind.popleft()
        if self._behind:
            asyncio.get_running_loop().call_soon(self._describe)

    def _hand_out(self, outputs: list[RequestOutput], to_abort: list[tuple[str, int | None]]) -> None:
        for internal_id, index in to_abort:
            self._abort_in_core(internal_id, index)
        for output in outputs:
            self._put(output)

    def _deliver_abort(self, internal_id: str) -> None:
        output = self._processor.abort(internal_id)
        if output is not None:
            self._abort_in_core(internal_id)
            self._put(output)

    def _put(self, output: RequestOutput) -> None:
        internal_id = output.request_id
        stream = self.streams.get(internal_id)
        if stream is None:
            return
        output.request_id = stream.external_id
        stream.put(output)
        if output.finished:
            self._end(internal_id, _detail(output))

    def _fail(self, internal_id: str, error: Exception, reasons: list[str]) -> None:
        stream = self.streams.get(internal_id)
        if stream is None:
            return
        output = self._processor.abort(internal_id)
        if output is not None:
            stream.metrics = output.metrics
        stream.metrics.finished_time = time.monotonic()
        stream.reasons = dict(enumerate(reasons))
        stream.fail(error)
        self._end(internal_id, str(error))

    def _end(self, internal_id: str, detail: str | None = None) -> None:
        stream = self.streams.pop(internal_id)
        if stream.watched is not None:
            self._client.ended(stream.watched.core_index)
            reasons = list(stream.reasons.values())
            self._observers.on_finished(
                stream.watched, RequestEnd(reasons, stream.metrics, stream.num_cached_tokens, detail)
            )

    def _abort_in_core(self, internal_id: str, index: int | None = None) -> None:
        stream = self.streams.get(internal_id)
        if stream is not None and stream.watched is not None:
            self._client.abort(stream.watched.core_index, Abort(internal_id, index))


def _detail(output: RequestOutput) -> str | None:
    """What went wrong, or whose time was over."""
    endings = {c.finish_reason: c.stop_reason for c in output.outputs}
    for reason in ("error", "abort"):
        if endings.get(reason) is not None:
            return str(endings[reason])
    return None
