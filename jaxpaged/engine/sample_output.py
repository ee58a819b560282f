"""One sample on its way out: its text, its tokens and their log-probabilities, and how much of them has been sent."""

from __future__ import annotations

import math

from jaxpaged.core.request import Request
from jaxpaged.core.step import RequestUpdate, TokenLogprobs
from jaxpaged.engine.describer import Describer
from jaxpaged.engine.output import CompletionOutput, PositionLogprobs
from jaxpaged.text.detokenizer import Detokenizer


class SampleOutput:
    """What has been generated of one sample, and how much of it has been sent.

    Attributes:
      index: which sample.
      finish_reason: why it ended; None before.
      num_tokens: how many tokens it has.
      last_token_time: when its latest token came, in seconds; None before. Whoever feeds it keeps it.
    """

    def __init__(self, request: Request, index: int, detokenizer: Detokenizer | None, describer: Describer):
        self.index, self.num_tokens = index, 0
        self.finish_reason: str | None = None
        self.last_token_time: float | None = None
        self._stop_reason: int | str | None = None
        self._params, self._detokenizer, self._describer = request.params, detokenizer, describer
        self._end_ids = request.eos_token_ids | request.stop_token_ids
        self._token_ids: list[int] = []
        self._raw_logprobs: list[TokenLogprobs] = []
        self._logprobs: list[PositionLogprobs] = []
        self._cumulative_logprob = 0.0
        self._last_token_hidden = False
        self._num_ready = 0  # tokens that may be sent: those whose text is out
        self._num_sent = 0
        self._new_text = ""
        self._end_sent = False

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens; -inf if it has none."""
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
                new = new[: detokenizer.num_tokens - self.num_tokens]
            elif self.finish_reason is not None:
                self._new_text += detokenizer.finish()
        if update.logprobs is not None:
            self._raw_logprobs += update.logprobs[: len(new)]
        self._token_ids += new
        self.num_tokens += len(new)
        if detokenizer is None or self.finish_reason is not None:
            self._num_ready = self.num_tokens
        else:
            self._num_ready = detokenizer.num_released
        return len(new)

    def fail(self, message: str) -> None:
        """Ends it with what has been described, unless its end has been sent."""
        if self._end_sent:
            return
        self.finish_reason, self._stop_reason, self._last_token_hidden = "error", message, False
        if self._params.logprobs is not None:
            described = len(self._logprobs)
            self._token_ids, self._raw_logprobs = self._token_ids[:described], self._raw_logprobs[:described]
        self._num_ready = self.num_tokens = len(self._token_ids)

    @property
    def changed(self) -> bool:
        """Whether something of it may be sent that has not been."""
        if self.finish_reason is not None:
            return not self._end_sent
        return bool(self._new_text) or self._num_ready > self._num_sent

    def completion(self, *, delta: bool) -> CompletionOutput:
        """All of it that may be sent, or what is new."""
        ready, start, text = self._num_ready, self._num_sent, self._new_text
        if not delta:
            start, text = 0, "" if self._detokenizer is None else self._detokenizer.text
        wanted = self._params.logprobs is not None
        if wanted:
            self._describe_logprobs(ready)
        return CompletionOutput(
            self.index,
            text,
            self._token_ids[start:ready],
            self._logprobs[start:ready] if wanted else None,
            self._cumulative_logprob if wanted else None,
            self.finish_reason,
            self._stop_reason,
            self._last_token_hidden,
        )

    def mark_sent(self) -> None:
        """What `completion` gave has been sent."""
        self._new_text, self._num_sent, self._end_sent = "", self._num_ready, self.finish_reason is not None

    def _describe_logprobs(self, ready: int) -> None:
        """Adds text to the logprobs of tokens that may be sent: only then are their places in the text final."""
        for i in range(len(self._logprobs), min(ready, len(self._raw_logprobs))):
            offset = 0 if self._detokenizer is None else self._detokenizer.text_offset(i)
            self._logprobs.append(self._describer.position(self._raw_logprobs[i], offset))
            self._cumulative_logprob += self._raw_logprobs[i].logprob
