"""From the engine's updates to outputs: detokenizes, finds stop strings, and says what may be sent."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import RequestUpdate, TokenLogprobs
from jaxpaged.engine.output import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput, TokenLogprob
from jaxpaged.text.detokenizer import Detokenizer, prompt_text

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Follows live requests. Used by one thread at a time."""

    def __init__(self, tokenizer: Tokenizer | None):
        """Args: tokenizer: None if no request wants text."""
        self._tokenizer = tokenizer
        self._live: dict[str, _LiveRequest] = {}

    def __len__(self) -> int:
        """Live requests."""
        return len(self._live)

    def add(self, request: Request, prompt: str | None = None) -> None:
        """Starts to follow a request, before its first update.

        Args:
          prompt: its text, to be handed back with the outputs.
        """
        assert request.request_id not in self._live, request.request_id
        self._live[request.request_id] = _LiveRequest(request, prompt, self._tokenizer)

    def process(self, updates: Sequence[RequestUpdate]) -> tuple[list[RequestOutput], list[tuple[str, int | None]]]:
        """Turns a step's updates into outputs; a fault in one request's ends that request alone, with "error".

        Returns: the outputs (none for a request of which nothing new may be sent yet), and what ended here while the
        engine still runs it, which therefore must abort it: (id, index) of samples that a stop string ended, (id, None)
        of requests. Updates of what has ended are ignored: the engine was already at its next token.
        """
        now = time.monotonic()
        to_abort: list[tuple[str, int | None]] = []
        touched: dict[str, _LiveRequest] = {}
        for update in updates:
            live = self._live.get(update.request_id)
            if live is None:
                continue
            touched[update.request_id] = live
            try:
                if live.consume(update, now):
                    to_abort.append((update.request_id, update.index))
            except Exception as error:
                to_abort += self._failed(live, error, now)
        outputs: list[RequestOutput] = []
        for request_id, live in touched.items():
            try:
                output = live.output()
            except Exception as error:
                to_abort += self._failed(live, error, now)
                output = live.output()
            if live.finished:
                del self._live[request_id]
            if output is not None:
                outputs.append(output)
        return outputs, to_abort

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request with what it has; None if it is not live. The engine must be told as well."""
        live = self._live.get(request_id)
        if live is None:
            return None
        ends = [RequestUpdate(request_id, [], finish_reason="abort", index=i) for i in live.unfinished]
        outputs, _ = self.process(ends)
        return outputs[0]

    def _failed(self, live: _LiveRequest, error: Exception, now: float) -> list[tuple[str, int | None]]:
        logger.error("request %s: its output could not be made", live.request.request_id, exc_info=error)
        live.fail(error, now)
        return [(live.request.request_id, None)]


class _LiveRequest:
    """A request's samples, its prompt's logprobs, and how much of them has been sent."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None):
        self.request, self._prompt = request, prompt
        self._params = params = request.params
        self._prompt_token_ids = request.prompt_token_ids
        self._describe = _Describer(tokenizer)
        count = params.n if params.use_beam_search else params.num_samples
        self._samples = [
            _Sample(request, i, self._detokenizer(tokenizer, params), self._describe) for i in range(count)
        ]
        self._wants_prompt = params.prompt_logprobs is not None
        self._compared = params.num_samples > params.n  # only the best are sent, so nothing before the end
        self._raw_prompt_logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._tokenizer = tokenizer
        self._num_cached_tokens = 0
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

    def consume(self, update: RequestUpdate, now: float) -> bool:
        """Takes an update in. Returns whether a stop string has ended the sample, which the engine still runs."""
        sample = self._samples[update.index]
        if sample.finish_reason is not None:
            return False
        if update.num_cached_tokens > self._num_cached_tokens:
            self._num_cached_tokens = update.num_cached_tokens
        if update.prompt_logprobs:
            self._raw_prompt_logprobs += update.prompt_logprobs
        metrics, num_new = self._metrics, sample.consume(update)
        if num_new:
            metrics.first_token_time = metrics.first_token_time or now
            metrics.last_token_time = now
            metrics.num_output_tokens += num_new
        if sample.finish_reason is None:
            return False
        self._num_unfinished -= 1
        metrics.finished_time = now
        return update.finish_reason is None

    @property
    def finished(self) -> bool:
        return not self._num_unfinished

    def fail(self, error: Exception, now: float) -> None:
        """Ends every sample whose end has not been sent."""
        for sample in self._samples:
            sample.fail(f"the output could not be made: {error!r}")
        self._wants_prompt = self._prompt_logprobs is not None
        self._num_unfinished = 0
        self._metrics.finished_time = now

    def output(self) -> RequestOutput | None:
        """What may be sent now; None if nothing is new."""
        kind = "final" if self._compared else self._params.output_kind
        if kind == "final" and self._num_unfinished:
            return None
        changed = [sample for sample in self._samples if sample.changed]
        if not changed:
            return None
        if self._compared:
            completions = self._best()
        else:
            delta = kind == "delta"
            completions = [sample.completion(delta=delta) for sample in (changed if delta else self._samples)]
        output = RequestOutput(
            self.request.request_id,
            self._prompt,
            self._prompt_token_ids,
            completions,
            self.finished,
            self._num_cached_tokens,
            self._metrics,
            self._prompt_output(once=kind == "delta"),
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

    def _prompt_output(self, *, once: bool) -> list[PositionLogprobs | None] | None:
        """The prompt's logprobs; all are known when the first output is sent."""
        if not self._wants_prompt or (once and self._prompt_logprobs is not None):
            return None
        if self._prompt_logprobs is None:
            raw, offsets = self._raw_prompt_logprobs, [0] * len(self._prompt_token_ids)
            if self._tokenizer is not None:
                _, offsets = prompt_text(self._tokenizer, self._prompt_token_ids, self._prompt, self._params)
            self._prompt_logprobs = [None]
            self._prompt_logprobs += map(self._describe.position, raw, offsets[1:])
        return self._prompt_logprobs


class _Sample:
    """What has been generated of one sample, and how much of it has been sent."""

    def __init__(self, request: Request, index: int, detokenizer: Detokenizer | None, describe: _Describer):
        self.index = index
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._params, self._detokenizer, self._describe = request.params, detokenizer, describe
        self._end_ids = request.eos_token_ids | request.stop_token_ids
        self._token_ids: list[int] = []
        self._raw_logprobs: list[TokenLogprobs] = []
        self._logprobs: list[PositionLogprobs] = []
        self._cumulative_logprob = 0.0
        self._last_token_hidden = False
        self._num_sent = 0
        self._new_text = ""
        self._end_sent = False

    @property
    def mean_logprob(self) -> float:
        """Of a token; the least of all if there is none."""
        if not self._raw_logprobs:
            return -math.inf
        return sum(entry.logprob for entry in self._raw_logprobs) / len(self._raw_logprobs)

    def consume(self, update: RequestUpdate) -> int:
        """Takes in new tokens; what follows a stop string is cut off. Returns how many there are."""
        new, detokenizer = update.new_token_ids, self._detokenizer
        self.finish_reason, self._stop_reason = update.finish_reason, update.stop_reason
        # The EOS or stop id that ends a text is no part of it; the last token of a grammar is.
        ends = update.finish_reason == "stop" and bool(new) and new[-1] in self._end_ids
        self._last_token_hidden = ends and not self._params.include_stop_str_in_output
        if detokenizer is not None:
            self._new_text += detokenizer.update(new[:-1] if self._last_token_hidden else new)
            if detokenizer.stop_reason is not None:
                self.finish_reason, self._stop_reason = "stop", detokenizer.stop_reason
                self._last_token_hidden = False
                new = new[: detokenizer.num_tokens - len(self._token_ids)]
            elif self.finish_reason is not None:
                self._new_text += detokenizer.finish()
        if update.logprobs is not None:
            self._raw_logprobs += update.logprobs[: len(new)]
        self._token_ids += new
        return len(new)

    def fail(self, message: str) -> None:
        """Ends it with what has been described, unless its end has been sent."""
        if self._end_sent:
            return
        self.finish_reason, self._stop_reason, self._last_token_hidden = "error", message, False
        if self._params.logprobs is not None:
            described = len(self._logprobs)
            self._token_ids, self._raw_logprobs = self._token_ids[:described], self._raw_logprobs[:described]

    @property
    def changed(self) -> bool:
        """Whether something of it may be sent that has not been."""
        if self.finish_reason is not None:
            return not self._end_sent
        return bool(self._new_text) or self._num_ready > self._num_sent

    def completion(self, *, delta: bool) -> CompletionOutput:
        """All of it that may be sent, or what is new."""
        ready = self._num_ready
        self._describe_logprobs(ready)
        start = self._num_sent if delta else 0
        text = "" if self._detokenizer is None else self._detokenizer.text
        wanted = self._params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self._new_text if delta else text,
            token_ids=self._token_ids[start:ready],
            logprobs=self._logprobs[start:ready] if wanted else None,
            cumulative_logprob=self._cumulative_logprob if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            last_token_hidden=self._last_token_hidden,
        )

    def mark_sent(self) -> None:
        """What `completion` gave has been sent."""
        self._new_text, self._num_sent, self._end_sent = "", self._num_ready, self.finish_reason is not None

    @property
    def _num_ready(self) -> int:
        """Tokens that may be sent: those whose text is out."""
        if self._detokenizer is None or self.finish_reason is not None:
            return len(self._token_ids)
        return self._detokenizer.num_released

    def _describe_logprobs(self, ready: int) -> None:
        """Adds text to the logprobs of tokens that may be sent: only then are their places in the text final."""
        if self._params.logprobs is None:
            return
        for i in range(len(self._logprobs), min(ready, len(self._raw_logprobs))):
            offset = 0 if self._detokenizer is None else self._detokenizer.text_offset(i)
            self._logprobs.append(self._describe.position(self._raw_logprobs[i], offset))
            self._cumulative_logprob += self._raw_logprobs[i].logprob


class _Describer:
    """Adds texts to logprob records."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer

    def position(self, raw: TokenLogprobs, text_offset: int) -> PositionLogprobs:
        """Args: text_offset: where the token's text starts."""
        ranks = range(1, len(raw.top_ids) + 1) if raw.top_ranks is None else raw.top_ranks
        rivals = zip(raw.top_ids, raw.top_logprobs, ranks, strict=True)
        return PositionLogprobs(
            raw.token_id,
            raw.logprob,
            raw.rank,
            *self._text(raw.token_id),
            top=tuple(
                TokenLogprob(token_id, logprob, rank, *self._text(token_id)) for token_id, logprob, rank in rivals
            ),
            text_offset=text_offset,
        )

    def _text(self, token_id: int) -> tuple[str, bytes]:
        raw = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return raw.decode("utf-8", "replace"), raw
