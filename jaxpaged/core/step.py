"""A step as plain data: what the scheduler decided, and what the device answered.

This is the only module that both halves (`core` on the host, `device` in JAX) know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from jaxpaged.core.request import Request

NOT_FINITE = -1
"""In place of a token: the model's logits are NaN or infinite, and so may be what its blocks hold."""
NONE_ALLOWED = -2
"""In place of a token: the logits are fine, but what the request itself asks for leaves no token."""


@dataclass(slots=True)
class Admission:
    """A request takes a slot: what the device must know of it once, before its first step there.

    Attributes:
      slot: row of the device's per-slot arrays, `0 <= slot < max_num_seqs`.
      request: the request; its known tokens (prompt and any output before a preemption) and sampling
        parameters are copied to the slot.
      block_ids: blocks it already holds (a prefix-cache hit), in order; later ones come as `new_blocks`.
    """

    slot: int
    request: Request
    block_ids: list[int]


@dataclass(slots=True)
class Swap:
    """Blocks that move between the pool and host memory.

    Attributes:
      key: names the copy in host memory; never used twice.
      block_ids: blocks of the pool, in the order in which they were (or are to be) copied.
    """

    key: int
    block_ids: list[int]


@dataclass(slots=True)
class PromptRange:
    """Prompt positions whose log-probabilities a step yields.

    The hidden state of position p gives the distribution of the token at p + 1. So positions `first` to
    `first + num_tokens - 1`, all at least 1, come from what row `row` feeds at one position less.
    """

    row: int
    first: int
    num_tokens: int


@dataclass(slots=True)
class PooledRange:
    """Prompt positions whose hidden states a step sums up: those that row `row` feeds from `first` on."""

    row: int
    first: int
    num_tokens: int

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first + self.num_tokens


@dataclass(slots=True)
class Step:
    """One step's work. Parallel lists, a row a request; rows with one token come first.

    The device does what a step says in this order: `dropped`, `swap_out`, `swap_in`, `copies`, admissions and new
    blocks, then the forward pass. So a swap or copy sees what earlier steps have written, nothing of this one.

    Row r feeds tokens `starts[r] .. starts[r] + num_tokens[r] - 1` of the sequence in slot `slots[r]`.
    If `samples[r]`, these reach the end of what is known or in flight, and the row yields new tokens. The row of a
    request for a vector never does.

    With `num_steps` above 1 all rows have one token, and the device goes on by itself: what a row yields is what it
    feeds next, one position further each time. It stops early when a row ends; so all rows yield as many tokens.
    """

    requests: list[Request] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # (slot, index in its table, block id)
    num_steps: int = 1
    total_tokens: int = 0  # of one of them
    num_prompt_tokens: int = 0  # those of `total_tokens` that are part of a prompt
    wants_logprobs: bool = False  # whether a sampling row does
    masked: list[int] = field(default_factory=list)  # sampling rows whose request has a grammar
    prompt_ranges: list[PromptRange] = field(default_factory=list)
    pooled: list[PooledRange] = field(default_factory=list)  # one a row at most
    copies: list[tuple[int, int]] = field(
        default_factory=list
    )  # (from, to): whole blocks; each `to` once, none a `from`
    swap_out: list[Swap] = field(default_factory=list)
    swap_in: list[Swap] = field(default_factory=list)  # the host copy is dropped afterwards
    dropped: list[int] = field(default_factory=list)  # keys of host copies that nobody will ask for


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position of a prompt or output.

    Attributes:
      token_id, logprob, rank: the token there; rank 1 is the most likely.
      top_ids, top_logprobs: the most likely tokens, best first, as many as the request asked for; or the tokens of
        its `logprob_token_ids`, in that order.
      top_ranks: their ranks, where they are not 1, 2, 3, ...
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]
    top_ranks: list[int] | None = None


@dataclass(slots=True)
class StepResult:
    """The device's answer to a `Step`, row by row.

    Attributes:
      token_ids: new tokens of each row; empty where the row does not sample. In place of a token may stand
        `NOT_FINITE` or `NONE_ALLOWED`: its request ends with an error; after the former the prefix cache is forgotten.
      logprobs: as `token_ids`, where the row's request wants them; None if no row does.
      prompt_logprobs: for each of the step's `prompt_ranges`, a record a position.
      pooled: for each of its `pooled`, the sum of the hidden states there, float32 [D].
      num_steps: how many of the step's `num_steps` were done, at least 1: as many tokens has each row that samples.
    """

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs]] | None = None
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    pooled: list[np.ndarray] = field(default_factory=list)
    num_steps: int = 1


class RequestUpdate(msgspec.Struct, array_like=True, gc=False):
    """What a step did to one sample of a request, for whoever turns tokens into text.

    Attributes:
      request_id: the request's, which all its samples share.
      finish_reason: None while it runs; "stop", "length", "abort" or "error".
      stop_reason: the stop token id that ended it, if one of the user's `stop_token_ids` did; "timeout" if its time was
        over; what went wrong, for "error"; else None.
      num_cached_tokens: prompt tokens found in the prefix cache when first admitted.
      index: which sample: 0 to `params.num_samples` - 1; of a beam search, the rank of the sequence.
      queued_time: when the engine took the request in, in seconds of its clock.
      scheduled_time: when the sample was first scheduled; None before.
      prompt_logprobs: records of the prompt's next positions, in order; the first is that of position 1.
      embedding: the vector that was asked for, little-endian float32, in the last update.
    """

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    index: int = 0
    queued_time: float | None = None
    scheduled_time: float | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes | None = None
