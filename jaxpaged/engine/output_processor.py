"""From the engine's updates to outputs: detokenizes, finds stop strings, and says what may be sent."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import RequestUpdate
from jaxpaged.engine.describer import Describer, PromptDescription
from jaxpaged.engine.observer import StepTokens
from jaxpaged.engine.output import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
from jaxpaged.engine.sample_output import SampleOutput
from jaxpaged.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Follows live requests. Used by one thread at a time.

    Attributes:
      tokens: what the last call of `process` brought.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, in_slices: bool = False):
        """
        Args:
          tokenizer: None if no request wants text.
          in_slices: leave prompts' log-probabilities, of which one step may bring a million, to calls of `describe`.
        """
        self._describer, self._in_slices = Describer(tokenizer), in_slices
        self._live: dict[str, _LiveRequest] = {}
        self.tokens = StepTokens()

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
        self._live[request.request_id] = _LiveRequest(request, prompt, prompt_offsets, self._describer)

    def process(self, updates: Sequence[RequestUpdate]) -> tuple[list[RequestOutput], list[tuple[str, int | None]]]:
        """Turns a step's updates into outputs; a fault in one request's ends that request alone, with "error".

        Returns: the outputs (none for a request of which nothing new may be sent yet), and what ended here while the
        engine still runs it, which therefore must abort it: (id, index) of samples that a stop string ended, (id, None)
        of requests. Updates of what has ended are ignored: the engine was already at its next token.
        """
        now, tokens = time.monotonic(), StepTokens()
        self.tokens = tokens
        to_abort: list[tuple[str, int | None]] = []
        touched: dict[str, _LiveRequest] = {}
        for update in updates:
            live = self._live.get(update.request_id)
            if live is None:
                continue
            touched[update.request_id] = live
            try:
                if live.consume(update, now, tokens):
                    to_abort.append((update.request_id, update.index))
                while not self._in_slices and live.is_behind:
                    live.describe()
            except Exception as error:
                to_abort += self._failed(live, error, now)
        return self._outputs(touched, to_abort, now), to_abort

    def is_behind(self, request_id: str) -> bool:
        """Whether a live request waits for `describe`."""
        return request_id in self._live and self._live[request_id].is_behind

    def describe(self, request_id: str) -> tuple[list[RequestOutput], list[tuple[str, int | None]]]:
        """Describes a slice of a prompt's log-probabilities, which takes milliseconds; returns what `process` does."""
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
        outputs = self.process(ends)[0] if ends else self._outputs({request_id: live}, [], time.monotonic())
        return outputs[0]

    def _outputs(
        self, touched: dict[str, _LiveRequest], to_abort: list[tuple[str, int | None]], now: float
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

    def _failed(self, live: _LiveRequest, error: Exception, now: float) -> list[tuple[str, int | None]]:
        logger.error("request %s: its output could not be made", live.request.request_id, exc_info=error)
        live.fail(error, now)
        return [(live.request.request_id, None)]


class _LiveRequest:
    """A request's samples, its prompt's logprobs, and how much of them has been sent."""

    def __init__(self, request: Request, prompt: str | None, prompt_offsets: list[int] | None, describer: Describer):
        self.request, self._prompt = request, prompt
        self._params = params = request.params
        self._prompt_token_ids = request.prompt_token_ids
        count = params.n if params.use_beam_search else params.num_samples
        self._samples = [
            SampleOutput(request, i, self._detokenizer(describer.tokenizer, params), describer) for i in range(count)
        ]
        self._prompt_description: PromptDescription | None = None
        if params.prompt_logprobs is not None:
            self._prompt_description = PromptDescription(
                request.prompt_token_ids, prompt, params, describer, prompt_offsets
            )
        self._prompt_sent = self._prompt_counted = False
        self._compared = params.num_samples > params.n  # only the best are sent, so nothing before the end
        self._kind = "final" if self._compared else params.output_kind
        self._num_cached_tokens = 0
        self._embedding: np.ndarray | None = None
        self._metrics = RequestMetrics(request.arrival_time)
        self._num_unfinished = count

    def _detokenizer(self, tokenizer: Tokenizer | None, params: SamplingParams) -> Detokenizer | None:
        if not params.detokenize or tokenizer is None:
            return None
        return Detokenizer(tokenizer, self._prompt_token_ids, params)

    @property
    def unfinished(self) -> list[int]:
        """Samples that still run."""
        return [sample.index for sample in self._samples if sample.finish_reason is None]

    def consume(self, update: RequestUpdate, now: float, tokens: StepTokens) -> bool:
        """Takes an update in. Returns whether a stop string has ended the sample, which the engine still runs.

        Args:
          tokens: what the step brings, where the update's part is added.
        """
        if update.prompt_logprobs and self._prompt_description is not None:
            self._prompt_description.add(update.prompt_logprobs)
        if update.embedding is not None:
            self._embedding = np.frombuffer(update.embedding, "<f4")
        sample = self._samples[update.index]
        if sample.finish_reason is not None:
            return False
        if update.num_cached_tokens > self._num_cached_tokens:
            self._num_cached_tokens = update.num_cached_tokens
        metrics, num_new = self._metrics, sample.consume(update)
        if metrics.scheduled_time is None:
            metrics.queued_time, metrics.scheduled_time = update.queued_time, update.scheduled_time
        if not self._prompt_counted and (num_new or update.finish_reason in ("stop", "length")):
            self._prompt_counted = True
            tokens.num_prompt_tokens += len(self._prompt_token_ids)
            tokens.num_cached_tokens += self._num_cached_tokens
        if num_new:
            if sample.last_token_time is not None:
                tokens.inter_token_seconds.append(now - sample.last_token_time)
            elif metrics.first_token_time is None:
                metrics.first_token_time = now
                tokens.first_token_seconds.append(now - metrics.arrival_time)
            sample.last_token_time = metrics.last_token_time = now
            metrics.num_output_tokens += num_new
            if sample.num_tokens > metrics.num_longest_tokens:  # `max` takes its time
                metrics.num_longest_tokens = sample.num_tokens
            tokens.num_generated_tokens += num_new
        if sample.finish_reason is None:
            return False
        self._num_unfinished -= 1
        metrics.finished_time = now
        return update.finish_reason is None

    @property
    def is_behind(self) -> bool:
        """Whether log-probabilities of the prompt have come that are not described."""
        return self._prompt_description is not None and self._prompt_description.is_behind

    def describe(self) -> None:
        """Describes a slice of them."""
        if self._prompt_description is not None:
            self._prompt_description.describe()

    def forget_prompt(self) -> None:
        """Waits no longer for its log-probabilities, unless they are all there."""
        if self._prompt_description is not None and not self._prompt_description.is_complete:
            self._prompt_description = None

    def fail(self, error: Exception, now: float) -> None:
        """Ends every sample whose end has not been sent."""
        for sample in self._samples:
            sample.fail(f"the output could not be made: {error!r}")
        self.forget_prompt()
        self._num_unfinished = 0
        self._metrics.finished_time = now

    def output(self) -> RequestOutput | None:
        """What may be sent now; None if nothing is new, or if the prompt must be described first."""
        delta, prompt = self._kind == "delta", self._prompt_description
        if (self._kind == "final" and self._num_unfinished) or (prompt is not None and prompt.is_behind):
            return None
        changed = [sample for sample in self._samples if sample.changed]
        if not changed:
            return None
        if self._compared:
            completions = self._best()
        else:
            completions = [sample.completion(delta=delta) for sample in (changed if delta else self._samples)]
        output = RequestOutput(
            self.request.request_id,
            self._prompt,
            self._prompt_token_ids,
            completions,
            not self._num_unfinished,
            self._num_cached_tokens,
            self._metrics,
            None if prompt is None else self._prompt_output(prompt, once=delta),
            self._embedding,
        )
        for sample in changed:
            sample.mark_sent()
        return output

    def _best(self) -> list[CompletionOutput]:
        ranked = sorted(self._samples, key=lambda sample: (sample.finish_reason == "error", -sample.mean_logprob))
        best = [sample.completion(delta=False) for sample in ranked[: self._params.n]]
        for index, completion in enumerate(best):
            completion.index = index
        return best

    def _prompt_output(self, prompt: PromptDescription, *, once: bool) -> list[PositionLogprobs | None] | None:
        """The prompt's logprobs. All are known when the first token is; what ends before that has none."""
        if not prompt.is_complete or (once and self._prompt_sent):
            return None
        self._prompt_sent = True
        return prompt.positions
