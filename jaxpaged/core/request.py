"""A request as the scheduler sees it: tokens, progress and blocks; never text."""

from __future__ import annotations

import copy
import enum
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import NONE_ALLOWED, NOT_FINITE

if TYPE_CHECKING:
    from jaxpaged.core.beam_group import BeamGroup


class Status(enum.Enum):
    WAITING = enum.auto()  # without a slot: new, or preempted
    RUNNING = enum.auto()  # has a slot and blocks
    FINISHED = enum.auto()


class Grammar(Protocol):
    """What a sample's text must match, followed token by token on the host.

    Each sample of a request has its own.
    """

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing can follow it."""
        ...

    def accept(self, token_id: int) -> bool:
        """Moves on by a sampled token. False: it cannot follow, or a limit was reached; then `error` says why."""
        ...

    @property
    def error(self) -> str:
        """What went wrong, or ""; with `GRAMMAR_STUCK` before it if that is the fault of who asked for this grammar."""
        ...

    def fill(self, mask: Any) -> None:
        """Writes which tokens may come next.

        Args:
          mask: a writable int32 NumPy row of ceil(vocab_size / 32) words; bit i of word w is token 32 w + i.
        """
        ...

    def copy(self) -> Grammar:
        """An independent one in the same state."""
        ...


class Ending(NamedTuple):
    """Why a request ends: its finish reason and stop reason."""

    finish_reason: str
    stop_reason: int | str | None = None


FAILURES = {
    NOT_FINITE: Ending("error", "the model's logits are NaN or infinite"),
    NONE_ALLOWED: Ending("error", "no token is allowed: what the request asks for leaves none"),
}
"""How a request ends that got one of these in place of a token."""

GRAMMAR_STUCK = "the structured output that was asked for cannot go on: "
"""How the stop reason begins where a grammar exceeds a limit as it runs, or no token of the model can follow."""


class Request:
    """One sequence to be continued.

    `num_computed_tokens` counts tokens whose K and V are in the cache or will be by the steps already
    launched. It catches up with `num_tokens + num_inflight_tokens`; there is no prefill or decode phase.

    Attributes:
      request_id: unique among live requests.
      prompt_token_ids: the prompt, at least one token.
      output_token_ids: tokens known on the host so far.
      num_inflight_tokens: tokens that launched steps will sample but the host has not seen.
      eos_token_ids: the model's end-of-sequence ids; empty with `ignore_eos`.
      seed: the resolved seed (the user's, or drawn by the engine).
      index: which of its request's samples this is; all have the same id.
      priority: smaller goes first, under the "priority" policy.
      bad_word_ids: token sequences that `params.bad_words` stand for.
      grammar: what the output must match; None: anything.
      device_options: sampling options as the device half packed them, opaque here; None: it uses none.
      num_prompt_logprobs: prompt positions whose log-probabilities launched steps yield, position 0 not counted.
      pooling: what vector it yields in place of tokens, resolved; None: it generates. Then the vector of its last step
        counts as a token in flight.
      num_pooled_tokens: leading prompt tokens whose hidden states are not needed (any more).
      pooled_sum: the sum of those that the host has seen.
      cache_salt: requests share cached blocks only with requests of the same salt.
      sort_key: smaller goes first; given once by the scheduler, and unique.
      is_plain: whether its tokens need no more than a look at their end: it has no grammar and no beams.
      group: the beam search that it belongs to; else None.
      source: a request that has computed all its tokens but the last, to share with; see `Source`.
      host_key: names its blocks in host memory, if they are there; else None.
      slot: its row on the device while RUNNING, else -1.
      num_cached_tokens: prompt tokens found in the prefix cache at first admission; -1 before.
      queued_time, scheduled_time: when the scheduler took it in, and when it first admitted it; None before.
      block_keys, num_registered_blocks, prefix_node, prefix_root, weight_version: the prefix cache's notes on this
        request; nobody else writes them.
    """

    __slots__ = (
        "all_token_ids", "arrival_time", "bad_word_ids", "block_ids", "block_keys", "cache_salt", "device_options",
        "eos_token_ids", "finish_reason", "grammar", "group", "host_key", "index", "is_plain", "max_total_tokens",
        "num_cached_tokens", "num_computed_tokens", "num_inflight_tokens", "num_pooled_tokens", "num_preemptions",
        "num_prompt_logprobs", "num_prompt_tokens", "num_registered_blocks", "params", "pooled_sum", "pooling",
        "prefix_node", "prefix_root", "priority", "queued_time", "request_id", "scheduled_time", "seed", "slot",
        "sort_key", "source", "status", "stop_reason", "stop_token_ids", "weight_version",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        cache_salt: str | None = None,
        priority: int = 0,
        bad_word_ids: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
        pooling: PoolingParams | None = None,
        arrival_time: float | None = None,
    ):
        self.request_id = request_id
        self.all_token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.params = params
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.seed = seed if params.seed is None else params.seed
        self.cache_salt = cache_salt
        self.index = 0
        self.priority = priority
        self.bad_word_ids = bad_word_ids
        self.grammar = grammar
        self.group: BeamGroup | None = None
        self.is_plain = grammar is None and params.max_tokens != 0
        self.device_options: Any = None
        self.num_prompt_logprobs = 0
        self.pooling = pooling
        self.num_pooled_tokens = pooling.first_position(self.num_prompt_tokens) if pooling else 0
        self.pooled_sum: np.ndarray | float = 0.0
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.sort_key: tuple[Any, ...] = ()
        room = max_model_len - self.num_prompt_tokens
        most = room if params.max_tokens is None else max(1, params.max_tokens)
        self.max_total_tokens = self.num_prompt_tokens + (1 if pooling else min(room, most))
        self.num_cached_tokens = -1
        self.queued_time: float | None = None
        self.scheduled_time: float | None = None
        self.num_preemptions = 0
        self.block_keys: list[tuple[bytes, bytes]] = []  # of full blocks of known tokens, computed lazily
        self.prefix_root = b""  # the cache's node before the first block
        self.weight_version = -1  # the weights that these keys, that root and the blocks belong to
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._begin()

    def _begin(self) -> None:
        self.status = Status.WAITING
        self.slot = -1
        self.num_computed_tokens = 0
        self.num_inflight_tokens = 0
        self.block_ids: list[int] = []
        self.num_registered_blocks = 0  # leading blocks already entered in the prefix cache
        self.prefix_node: int | bytes = b""  # the cache's node after those blocks
        self.host_key: int | None = None
        self.source: Source | None = None

    def fork(self, index: int) -> Request:
        """Another sample of this request, with the same tokens so far and options, and without slot or blocks.

        Nothing more is asked of its prompt.
        """
        other = copy.copy(self)
        other.index, other.sort_key = index, (*self.sort_key[:-1], index)
        other.all_token_ids, other.block_keys = list(self.all_token_ids), list(self.block_keys)
        other.grammar = self.grammar and self.grammar.copy()
        other.num_prompt_logprobs = self.num_prompt_tokens - 1
        other._begin()
        return other

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host: prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens known or in flight that are not computed yet; at least one while it runs."""
        return len(self.all_token_ids) + self.num_inflight_tokens - self.num_computed_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to come."""
        return self.params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def max_prefix_tokens(self) -> int:
        """Leading tokens that need not be fed if their keys and values are there.

        Never the last one, nor any that the prompt's log-probabilities or its vector still need.
        """
        if self.pooling is not None:
            return min(self.num_pooled_tokens, len(self.all_token_ids) - 1)
        return self.num_prompt_logprobs if self.wants_prompt_logprobs else len(self.all_token_ids) - 1

    def pool(self, total: np.ndarray, end: int) -> tuple[Ending | None, bytes | None]:
        """Takes in the sum of the hidden states of its next positions, up to `end`.

        Returns:
          Why the request ends, if these were the last ones, and its vector, little-endian float32.
        """
        assert self.pooling is not None
        self.pooled_sum = self.pooled_sum + total.astype(np.float64)
        if end < self.num_prompt_tokens:
            return None, None
        if not np.isfinite(self.pooled_sum).all():
            return FAILURES[NOT_FINITE], None
        count = self.num_prompt_tokens - self.pooling.first_position(self.num_prompt_tokens)
        return Ending("stop"), self.pooling.vector(self.pooled_sum, count).tobytes()

    def extend(self, tokens: Sequence[int]) -> tuple[int, Ending | None]:
        """Appends sampled tokens up to the one that ends the request.

        What is no token (see `FAILURES`), one that the grammar refuses, and that of a request for no
        tokens are not appended, nor is what follows.

        Returns:
          How many were appended, and why the request ends, if it does.
        """
        for i, token in enumerate(tokens):
            if token < 0:
                return i, FAILURES[token]
            if self.params.max_tokens == 0:
                return i, Ending("length")
            self.all_token_ids.append(token)
            ending = self.ending()
            if self.grammar is not None and (ending is None or ending.finish_reason != "stop" or self.grammar.error):
                if error := _advance(self.grammar, token):
                    del self.all_token_ids[-1]
                    return i, Ending("error", error)
                if self.grammar.finished:
                    ending = Ending("stop")
            if ending:
                return i + 1, ending
        return len(tokens), None

    def ending(self) -> Ending | None:
        """Why the latest token is the last one, or None.

        Neither EOS nor a stop id ends a request that has fewer than `min_tokens`, that one included. One that
        was sampled always ends it: the device bans them until `min_tokens` have been produced.
        """
        token = self.all_token_ids[-1]
        if self.num_output_tokens >= self.params.min_tokens:
            if token in self.eos_token_ids:
                return Ending("stop")
            if token in self.stop_token_ids:
                return Ending("stop", token)
        return Ending("length") if len(self.all_token_ids) >= self.max_total_tokens else None


class Source(NamedTuple):
    """Whose blocks a request may start with.

    Attributes:
      request: who computed them.
      num_preemptions: its count at the time: once it has lost its blocks they are not these any more.
    """

    request: Request
    num_preemptions: int

    def holds_them(self, weight_version: int) -> bool:
        """Whether the blocks are still there, and of these weights."""
        request, epoch = self
        runs = request.status is Status.RUNNING and request.num_preemptions == epoch
        return runs and request.weight_version == weight_version


def _advance(grammar: Grammar, token: int) -> str:
    """Moves a grammar on by a token. Returns what went wrong, or ""; a fault in one concerns only its request."""
    try:
        return "" if grammar.accept(token) else grammar.error or f"the grammar does not allow token {token}"
    except Exception as error:
        return f"the grammar failed: {error!r}"
