"""What a caller gets back: text and tokens of a request, made from the engine's updates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from jaxpaged.core.request import Request
from jaxpaged.core.step import RequestUpdate, TokenLogprobs
from jaxpaged.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

# cumulative: each output holds everything so far. delta: what is new since the last one. final: one, at the end.
OutputMode = Literal["cumulative", "delta", "final"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and how likely it was at its position.

    Attributes:
      token_id: the token.
      logprob: natural logarithm of its probability; -inf if it was impossible.
      rank: 1 is the most likely token.
      token: its text; a token that is part of a character gives U+FFFD.
      bytes: its bytes: these tell such tokens apart, and those of successive tokens join to the text.
    """

    token_id: int
    logprob: float
    rank: int
    token: str
    bytes: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs(TokenLogprob):
    """The sampled token of one output position, and its rivals.

    Attributes:
      top: the most likely tokens, best first, as many as asked for; the sampled one may be among them.
      text_offset: where the sampled token's text starts in the output's text, in characters.
    """

    top: tuple[TokenLogprob, ...]
    text_offset: int


class LogprobArrays(NamedTuple):
    """Logprobs of n positions with k candidates each.

    Attributes:
      token_ids, logprobs, ranks: `[n]` of the sampled tokens: int32, float32, int32.
      top_ids, top_logprobs: `[n, k]`, best first: int32, float32.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def logprob_arrays(positions: Sequence[PositionLogprobs]) -> LogprobArrays:
    """Logprob records as arrays."""
    shape = (len(positions), len(positions[0].top) if positions else 0)
    return LogprobArrays(
        np.array([p.token_id for p in positions], np.int32),
        np.array([p.logprob for p in positions], np.float32),
        np.array([p.rank for p in positions], np.int32),
        np.array([[t.token_id for t in p.top] for p in positions], np.int32).reshape(shape),
        np.array([[t.logprob for t in p.top] for p in positions], np.float32).reshape(shape),
    )


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    `token_ids` and `logprobs` end at the same token: the one whose text was released last, or at the end the one
    that ended the request, which is included (an EOS, a stop id, or the last token of a stop string).

    Attributes:
      index: which of the request's continuations this is.
      text: without the stop string or stop token, unless `include_stop_str_in_output`.
      token_ids: output tokens.
      logprobs: a record a token, or None if not asked for.
      cumulative_logprob: sum of the sampled tokens' logprobs so far, in every mode; None if not asked for.
      finish_reason: None while it runs; "stop", "length", "abort" or "error".
      stop_reason: the stop string or stop token id that ended it; what went wrong, for "error"; None for EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in seconds of `time.monotonic()`.

    Attributes:
      arrival_time: when it was made.
      first_token_time: when its first token reached the host; None before.
      last_token_time: when its latest one did.
      finished_time: when it ended; None before.
      num_output_tokens: tokens so far.
    """

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_output_tokens: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tokens_per_second(self) -> float | None:
        """Rate of the tokens after the first."""
        if self.first_token_time is None or self.last_token_time is None or self.num_output_tokens < 2:
            return None
        return (self.num_output_tokens - 1) / max(self.last_token_time - self.first_token_time, 1e-9)


@dataclass(slots=True)
class RequestOutput:
    """A request's output: so far, since the last one, or whole, as its mode says.

    Attributes:
      request_id: the id it was given.
      prompt: its text, if it was given as text.
      prompt_token_ids: its tokens.
      outputs: the continuations.
      finished: whether this is the last output.
      num_cached_tokens: prompt tokens found in the prefix cache.
      metrics: its times.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics

    @property
    def text(self) -> str:
        """Text of the first continuation."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first continuation."""
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[PositionLogprobs] | None:
        """Logprobs of the first continuation."""
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        """Why the first continuation ended."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """What ended the first continuation."""
        return self.outputs[0].stop_reason

    def extend(self, later: RequestOutput) -> None:
        """Appends a later delta of the same request."""
        for mine, new in zip(self.outputs, later.outputs, strict=True):
            mine.text += new.text
            mine.token_ids += new.token_ids
            if mine.logprobs is not None and new.logprobs is not None:
                mine.logprobs += new.logprobs
            mine.cumulative_logprob = new.cumulative_logprob
            mine.finish_reason, mine.stop_reason = new.finish_reason, new.stop_reason
        self.finished, self.num_cached_tokens, self.metrics = later.finished, later.num_cached_tokens, later.metrics


class OutputProcessor:
    """Detokenizes live requests, finds their stop strings, and says what to send. Used by one thread at a time."""

    def __init__(self, tokenizer: Tokenizer | None):
        """Args: tokenizer: None if no request wants text."""
        self._tokenizer = tokenizer
        self._live: dict[str, _LiveRequest] = {}

    def __len__(self) -> int:
        """Live requests."""
        return len(self._live)

    def add(self, request: Request, prompt: str | None = None, *, mode: OutputMode = "cumulative") -> None:
        """Starts to follow a request, before its first update.

        Args:
          prompt: its text, to be handed back with the outputs.
          mode: which outputs `process` gives for it.
        """
        assert request.request_id not in self._live, request.request_id
        self._live[request.request_id] = _LiveRequest(request, prompt, mode, self._tokenizer)

    def process(self, updates: Sequence[RequestUpdate]) -> tuple[list[RequestOutput], list[str]]:
        """Turns a step's updates into outputs.

        Returns: the outputs (none for a request of which nothing new may be sent yet), and the ids of requests that a
        stop string ended: the engine still runs these and must abort them. Updates of unknown requests are ignored:
        they were ended here while the engine was already at their next token.
        """
        now = time.monotonic()
        outputs: list[RequestOutput] = []
        to_abort: list[str] = []
        for update in updates:
            live = self._live.get(update.request_id)
            if live is None:
                continue
            live.consume(update, now)
            if live.finish_reason is not None:
                del self._live[update.request_id]
                if update.finish_reason is None:
                    to_abort.append(update.request_id)
            output = live.output()
            if output is not None:
                outputs.append(output)
        return outputs, to_abort

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request with what it has; None if it is not live. The engine must be told as well."""
        live = self._live.get(request_id)
        if live is None:
            return None
        last = RequestUpdate(request_id, [], finish_reason="abort", num_cached_tokens=live.num_cached_tokens)
        outputs, _ = self.process([last])
        return outputs[0]


@dataclass(slots=True)
class _LiveRequest:
    """What has been generated of a request, and how much of it has been sent."""

    request: Request
    prompt: str | None
    mode: OutputMode
    tokenizer: Tokenizer | None
    token_ids: list[int] = field(default_factory=list)
    raw_logprobs: list[TokenLogprobs] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_sent: int = 0
    new_text: str = ""
    detokenizer: Detokenizer | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    metrics: RequestMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids = self.request.prompt_token_ids
        self.metrics = RequestMetrics(self.request.arrival_time)
        if self.request.params.detokenize and self.tokenizer is not None:
            self.detokenizer = Detokenizer(self.tokenizer, self.prompt_token_ids, self.request.params)

    def consume(self, update: RequestUpdate, now: float) -> None:
        """Takes in new tokens; what follows a stop string is cut off."""
        new, detokenizer = update.new_token_ids, self.detokenizer
        self.num_cached_tokens = max(update.num_cached_tokens, 0)
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        if detokenizer is not None:
            # The token that ends a text is no part of it.
            hidden = update.finish_reason == "stop" and not self.request.params.include_stop_str_in_output
            self.new_text += detokenizer.update(new[:-1] if hidden else new)
            if detokenizer.stop_reason is not None:
                self.finish_reason, self.stop_reason = "stop", detokenizer.stop_reason
                new = new[: detokenizer.num_tokens - len(self.token_ids)]
            elif self.finish_reason is not None:
                self.new_text += detokenizer.finish()
        if update.logprobs is not None:
            self.raw_logprobs += update.logprobs[: len(new)]
        self.token_ids += new
        self._note_times(len(new), now)

    def output(self) -> RequestOutput | None:
        """What may be sent now; None if nothing is new."""
        finished = self.finish_reason is not None
        if self.mode == "final" and not finished:
            return None
        ready = self._num_ready()
        if not finished and not self.new_text and ready == self.num_sent:
            return None
        self._describe_logprobs(ready)
        start = self.num_sent if self.mode == "delta" else 0
        completion = CompletionOutput(
            index=0,
            text=self.new_text if self.mode == "delta" else self._text(),
            token_ids=self.token_ids[start:ready],
            logprobs=None if self.request.params.logprobs is None else self.logprobs[start:ready],
            cumulative_logprob=None if self.request.params.logprobs is None else self.cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        self.new_text, self.num_sent = "", ready
        return RequestOutput(
            self.request.request_id,
            self.prompt,
            self.prompt_token_ids,
            [completion],
            finished,
            self.num_cached_tokens,
            self.metrics,
        )

    def _num_ready(self) -> int:
        """Tokens that may be sent: those whose text is out."""
        if self.detokenizer is None or self.finish_reason is not None:
            return len(self.token_ids)
        return self.detokenizer.num_released

    def _describe_logprobs(self, ready: int) -> None:
        """Adds text to the logprobs of tokens that may be sent: only then are their places in the text final."""
        for i in range(len(self.logprobs), min(ready, len(self.raw_logprobs))):
            self.logprobs.append(self._position(self.raw_logprobs[i], i))
            self.cumulative_logprob += self.raw_logprobs[i].logprob

    def _text(self) -> str:
        return "" if self.detokenizer is None else self.detokenizer.text

    def _note_times(self, num_new: int, now: float) -> None:
        if num_new:
            self.metrics.first_token_time = self.metrics.first_token_time or now
            self.metrics.last_token_time = now
            self.metrics.num_output_tokens += num_new
        if self.finish_reason is not None:
            self.metrics.finished_time = now

    def _position(self, position: TokenLogprobs, index: int) -> PositionLogprobs:
        token, raw = self._token_text(position.token_id)
        return PositionLogprobs(
            position.token_id,
            position.logprob,
            position.rank,
            token,
            raw,
            top=tuple(
                TokenLogprob(token_id, logprob, rank, *self._token_text(token_id))
                for rank, (token_id, logprob) in enumerate(
                    zip(position.top_ids, position.top_logprobs, strict=True), start=1
                )
            ),
            text_offset=0 if self.detokenizer is None else self.detokenizer.text_offset(index),
        )

    def _token_text(self, token_id: int) -> tuple[str, bytes]:
        raw = b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)
        return raw.decode("utf-8", "replace"), raw
