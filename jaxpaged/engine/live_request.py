"""One request on its way out: its samples, the log-probabilities of its prompt, its times, and what has been sent."""

from __future__ import annotations

from copy import copy
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


class LiveRequest:
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

    def consume(self, update: RequestUpdate, step_time: float, now: float, tokens: StepTokens) -> bool:
        """Takes an update in. Returns whether a stop string has ended the sample, which the engine still runs.

        Args:
          step_time: when the engine's step was over.
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
                tokens.inter_token_seconds += [(step_time - sample.last_token_time) / num_new] * num_new
            elif metrics.first_token_time is None:
                metrics.first_token_time = step_time
                tokens.first_token_seconds.append(now - metrics.arrival_time)
            sample.last_token_time = metrics.last_token_time = step_time
            metrics.num_output_tokens += num_new
            if sample.num_tokens > metrics.num_longest_tokens:  # `max` takes its time
                metrics.num_longest_tokens = sample.num_tokens
            tokens.num_generated_tokens += num_new
        if sample.finish_reason is None:
            return False
        self._num_unfinished -= 1
        if not self._num_unfinished:
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
            copy(self._metrics),  # which goes on
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
