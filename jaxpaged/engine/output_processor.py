"""From the engine's updates to outputs: detokenizes, finds stop strings, and says what may be sent."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxpaged.core.request import Request
from jaxpaged.core.step import RequestUpdate
from jaxpaged.engine.describer import Describer
from jaxpaged.engine.live_request import LiveRequest
from jaxpaged.engine.observer import StepTokens
from jaxpaged.engine.output import RequestOutput

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Processed(NamedTuple):
    """What comes of a step's updates.

    Attributes:
      outputs: none for a request of which nothing new may be sent yet.
      to_abort: what ended here while the engine still runs it, which therefore must abort it: (id, index) of samples
        that a stop string ended, (id, None) of requests.
      tokens: what the step brought.
    """

    outputs: list[RequestOutput]
    to_abort: list[tuple[str, int | None]]
    tokens: StepTokens


class OutputProcessor:
    """Follows live requests. Used by one thread at a time."""

    def __init__(self, tokenizer: Tokenizer | None, *, in_slices: bool = False):
        """
        Args:
          tokenizer: None if no request wants text.
          in_slices: leave prompts' log-probabilities, of which one step may bring a million, to calls of `describe`.
        """
        self._describer, self._in_slices = Describer(tokenizer), in_slices
        self._live: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        """Live requests."""
        return len(self._live)

    def add(self, request: Request, prompt: str | None = None, prompt_offsets: list[int] | None = None) -> None:
        """Starts to follow a request, before its first update.

        Args:
          prompt: its text, to be handed back with the outputs.
          prompt_offsets: where in it each prompt token starts; None: to be found out, if `prompt_logprobs` asks for it.
        """
        assert request.request_id not in self._live, request.request_id
        self._live[request.request_id] = LiveRequest(request, prompt, prompt_offsets, self._describer)

    def process(self, updates: Sequence[RequestUpdate], step_time: float | None = None) -> Processed:
        """Turns a step's updates into outputs; a fault in one request's ends that request alone, with "error".

        Updates of what has ended are ignored: the engine was already at its next token.

        Args:
          step_time: when the step was over; None: now.
        """
        now, tokens = time.monotonic(), StepTokens()
        if step_time is None:
            step_time = now
        to_abort: list[tuple[str, int | None]] = []
        touched: dict[str, LiveRequest] = {}
        for update in updates:
            live = self._live.get(update.request_id)
            if live is None:
                continue
            touched[update.request_id] = live
            try:
                if live.consume(update, step_time, now, tokens):
                    to_abort.append((update.request_id, update.index))
                while not self._in_slices and live.is_behind:
                    live.describe()
            except Exception as error:
                to_abort += self._failed(live, error, now)
        return Processed(self._outputs(touched, to_abort, now), to_abort, tokens)

    def is_behind(self, request_id: str) -> bool:
        """Whether a live request waits for `describe`."""
        return request_id in self._live and self._live[request_id].is_behind

    def describe(self, request_id: str) -> tuple[list[RequestOutput], list[tuple[str, int | None]]]:
        """Describes a slice of a prompt's log-probabilities, which takes milliseconds.

        Returns: outputs and what to abort, as `process` does.
        """
        live, now = self._live.get(request_id), time.monotonic()
        to_abort: list[tuple[str, int | None]] = []
        if live is None:
            return [], to_abort
        try:
            live.describe()
        except Exception as error:
            to_abort += self._failed(live, error, now)
        return self._outputs({request_id: live}, to_abort, now), to_abort

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request with what it has; None if it is not live. The engine must be told as well."""
        live = self._live.get(request_id)
        if live is None:
            return None
        live.forget_prompt()
        ends = [RequestUpdate(request_id, [], finish_reason="abort", index=i) for i in live.unfinished]
        outputs = self.process(ends).outputs if ends else self._outputs({request_id: live}, [], time.monotonic())
        return outputs[0]

    def _outputs(
        self, touched: dict[str, LiveRequest], to_abort: list[tuple[str, int | None]], now: float
    ) -> list[RequestOutput]:
        """What may be sent of these now; those that have ended are followed no longer."""
        outputs: list[RequestOutput] = []
        for request_id, live in touched.items():
            try:
                output = live.output()
            except Exception as error:
                to_abort += self._failed(live, error, now)
                output = live.output()
            if output is not None:
                outputs.append(output)
                if output.finished:
                    del self._live[request_id]
        return outputs

    def _failed(self, live: LiveRequest, error: Exception, now: float) -> list[tuple[str, int | None]]:
        logger.error("request %s: its output could not be made", live.request.request_id, exc_info=error)
        live.fail(error, now)
        return [(live.request.request_id, None)]
