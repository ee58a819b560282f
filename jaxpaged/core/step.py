"""A step as plain data: what the scheduler decided, and what the device answered.

This is the only module that both halves (`core` on the host, `device` in JAX) know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from jaxpaged.core.request import Request


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
class Step:
    """One step's work. Parallel lists, a row a request; rows with one token come first.

    Row r feeds tokens `starts[r] .. starts[r] + num_tokens[r] - 1` of the sequence in slot `slots[r]`.
    If `samples[r]`, these reach the end of what is known or in flight, and the row yields new tokens.
    """

    requests: list[Request] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # (slot, index in its table, block id)
    total_tokens: int = 0
    max_logprobs: int = -1  # largest `logprobs` that a sampling row wants; -1: none wants any


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one generated position.

    Attributes:
      token_id, logprob, rank: the sampled token; rank 1 is the most likely.
      top_ids, top_logprobs: the most likely tokens, best first, as many as the request asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class StepResult:
    """The device's answer to a `Step`, row by row.

    Attributes:
      token_ids: new tokens of each row; empty where the row does not sample. A negative one says that the logits
        were not finite: the request ends with an error.
      logprobs: as `token_ids`, where the row's request wants them; None if no row does.
    """

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs]] | None = None


class RequestUpdate(msgspec.Struct):
    """What a step did to one request, for whoever turns tokens into text.

    Attributes:
      finish_reason: None while it runs; "stop", "length", "abort" or "error".
      stop_reason: the stop token id that ended it, if one of the user's `stop_token_ids` did; what went wrong, for
        "error"; else None.
      num_cached_tokens: prompt tokens found in the prefix cache when first admitted.
    """

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
