"""What a caller gets back: text, tokens and log-probabilities of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
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


class PositionLogprobs(TokenLogprob, frozen=True, gc=False):
    """The token at one position of an output or a prompt, and its rivals.

    Attributes:
      top: the most likely tokens, best first, as many as asked for (the token itself may be among them); or those of
        `logprob_token_ids`, in that order.
      text_offset: where the token's text starts in the text of the output, or of the prompt, in characters.
    """

    top: tuple[TokenLogprob, ...]
    text_offset: int


class LogprobArrays(NamedTuple):
    """Logprobs of n positions with k candidates each.

    Attributes:
      token_ids, logprobs, ranks: `[n]` of the tokens there: int32, float32, int32.
      top_ids, top_logprobs, top_ranks: `[n, k]`: int32, float32, int32.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    top_ranks: np.ndarray


def logprob_arrays(positions: Sequence[PositionLogprobs]) -> LogprobArrays:
    """Logprob records as arrays. Of `prompt_logprobs`, leave out the first: it is None."""
    shape = (len(positions), len(positions[0].top) if positions else 0)
    return LogprobArrays(
        np.array([p.token_id for p in positions], np.int32),
        np.array([p.logprob for p in positions], np.float32),
        np.array([p.rank for p in positions], np.int32),
        np.array([[t.token_id for t in p.top] for p in positions], np.int32).reshape(shape),
        np.array([[t.logprob for t in p.top] for p in positions], np.float32).reshape(shape),
        np.array([[t.rank for t in p.top] for p in positions], np.int32).reshape(shape),
    )


class CompletionOutput(msgspec.Struct, gc=False):
    """One continuation of a prompt.

    `token_ids` and `logprobs` end at the same token: the one whose text was released last, or at the end the one
    that ended it, which is included (an EOS, a stop id, or the last token of a stop string).

    Attributes:
      index: which of the request's continuations this is, from 0 to n - 1. With `best_of` or beam search 0 is the
        best.
      text: without the stop string or stop token, unless `include_stop_str_in_output`.
      token_ids: output tokens.
      logprobs: a record a token, or None if not asked for.
      cumulative_logprob: sum of the sampled tokens' logprobs so far, in every kind of output; None if not asked for.
      finish_reason: None while it runs; "stop", "length", "abort" or "error".
      stop_reason: the stop string or stop token id that ended it; "timeout", for an "abort"; what went wrong, for
        "error"; None for EOS.
      last_token_hidden: whether the last token is an EOS or stop id that ended the text and is no part of it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_token_hidden: bool = False

    def extend(self, later: CompletionOutput) -> None:
        """Appends a later delta of the same continuation."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs += later.logprobs
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.last_token_hidden = later.last_token_hidden


class RequestMetrics(msgspec.Struct, gc=False):
    """Times of a request, in seconds of `time.monotonic()`.

    Attributes:
      arrival_time: when it was made.
      queued_time: when the engine took it in; None before its first update.
      scheduled_time: when it was first part of a step; None before.
      first_token_time: when the step that made its first token was over; None before.
      last_token_time: when that of its latest one was.
      finished_time: when its last sample ended; None before.
      num_output_tokens: tokens so far, of all its samples.
      num_longest_tokens: of the longest of them.
    """

    arrival_time: float
    queued_time: float | None = None
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_output_tokens: int = 0
    num_longest_tokens: int = 0

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


class RequestOutput(msgspec.Struct, gc=False):
    """A request's output: so far, since the last one, or whole, as its `output_kind` says.

    Attributes:
      request_id: the id it was given.
      prompt: its text, if it was given as text.
      prompt_token_ids: its tokens.
      outputs: the continuations in order of their index: all n, or in a delta only those of which something is new
        (at least one; `CompletionOutput.index` tells which).
      finished: whether this is the last output: every continuation has ended.
      num_cached_tokens: prompt tokens found in the prefix cache.
      metrics: its times, as of this output.
      prompt_logprobs: a record a prompt token, the first one None; None if not asked for, or if the request ended
        (by an abort, say) before all were known. Of the deltas only the first has it.
      embedding: the vector that was asked for in place of text, float32; None if none was, or it could not be made.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    embedding: np.ndarray | None = None

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
        mine = {completion.index: completion for completion in self.outputs}
        for completion in later.outputs:
            if completion.index in mine:
                mine[completion.index].extend(completion)
            else:
                mine[completion.index] = completion
        self.outputs = [mine[index] for index in sorted(mine)]
        self.finished, self.num_cached_tokens, self.metrics = later.finished, later.num_cached_tokens, later.metrics
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
