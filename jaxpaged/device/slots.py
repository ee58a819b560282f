"""What the device keeps of each running request between steps: its tokens, its blocks, its sampling parameters.

A request takes a slot when it is admitted and keeps it while it runs. Its tokens are uploaded once; sampled ones
are appended on the device, so that the next step needs no round trip to the host.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import MAX_EOS_TOKEN_IDS, MAX_STOP_TOKEN_IDS
from jaxpaged.core.step import Admission

NO_TOKEN = 2**31 - 1  # outside every vocabulary: scatters drop it

_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_INTS = ("features", "num_prompt_tokens", "sample_index", "min_total_tokens", "top_k", "seed_high", "seed_low")
_NUM_STOPS = MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS


class Feature(enum.IntFlag):
    """What a request uses beyond the most likely token; a step whose rows use none of one does nothing for it."""

    ALLOWED_IDS = enum.auto()
    GRAMMAR = enum.auto()
    BAD_WORDS = enum.auto()
    MIN_TOKENS = enum.auto()
    LOGIT_BIAS = enum.auto()
    PENALTIES = enum.auto()
    PROCESSORS = enum.auto()
    RANDOM = enum.auto()  # sampled, not greedy
    TOP_K = enum.auto()
    TOP_P = enum.auto()
    LOGPROBS = enum.auto()
    TOP_LOGPROBS = enum.auto()  # of the most likely tokens too
    PROCESSED_LOGPROBS = enum.auto()  # of what is sampled from
    LOGPROB_IDS = enum.auto()  # of given tokens


NO_FEATURE = Feature(0)
NEEDS_HOST = (
    Feature.GRAMMAR | Feature.LOGPROBS | Feature.TOP_LOGPROBS | Feature.PROCESSED_LOGPROBS | Feature.LOGPROB_IDS
)
"""What a step cannot do alone: the host has to be asked before it, or told of it."""


def features(request: Request, logprobs_mode: str = "raw_logprobs") -> Feature:
    """What a request uses.

    Args:
      logprobs_mode: the engine's, for a request that does not say.
    """
    params = request.params
    wants_logprobs, given = params.num_logprobs is not None, params.logprob_token_ids is not None
    processed = (params.logprobs_mode or logprobs_mode) == "processed_logprobs"
    used = {
        Feature.ALLOWED_IDS: params.allowed_token_ids is not None,
        Feature.GRAMMAR: request.grammar is not None,
        Feature.BAD_WORDS: bool(request.bad_word_ids),
        Feature.MIN_TOKENS: params.min_tokens > 0,
        Feature.LOGIT_BIAS: bool(params.logit_bias),
        Feature.PENALTIES: (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1),
        Feature.PROCESSORS: bool(params.logits_processors),
        Feature.RANDOM: not params.greedy,
        Feature.TOP_K: not params.greedy and params.top_k > 0,
        Feature.TOP_P: not params.greedy and params.top_p < 1,
        Feature.LOGPROBS: wants_logprobs,
        Feature.TOP_LOGPROBS: params.num_logprobs not in (None, 0) and not given,
        Feature.PROCESSED_LOGPROBS: wants_logprobs and processed,
        Feature.LOGPROB_IDS: given,
    }
    return Feature(sum(flag for flag, is_used in used.items() if is_used))


class Slots(NamedTuple):
    """Per-slot arrays; the last row belongs to no request: padding rows of a step point at it.

    Attributes:
      history: i32[slots + 1, max_model_len], token ids by position.
      block_table: i32[slots + 1, max_pages], page ids; 0 (scratch) where none is allocated.
      floats: f32[slots + 1, len(_FLOATS)].
      ints: i32[slots + 1, len(_INTS)].
      stop_ids: i32[slots + 1, _NUM_STOPS], ids that end the request, padded with NO_TOKEN.
    """

    history: jax.Array
    block_table: jax.Array
    floats: jax.Array
    ints: jax.Array
    stop_ids: jax.Array

    def column(self, name: str, rows: jax.Array) -> jax.Array:
        """Sampling parameter `name` of the given slots; `features` holds the bits of `Feature`."""
        if name in _FLOATS:
            return self.floats[rows, _FLOATS.index(name)]
        return self.ints[rows, _INTS.index(name)]


def empty_slots(num_slots: int, max_model_len: int, max_pages: int) -> Slots:
    """Empty state for `num_slots` requests and the padding row, which uses no `Feature`."""
    n = num_slots + 1
    return Slots(
        history=jnp.zeros((n, max_model_len), jnp.int32),
        block_table=jnp.zeros((n, max_pages), jnp.int32),
        floats=jnp.ones((n, len(_FLOATS)), jnp.float32),
        ints=jnp.zeros((n, len(_INTS)), jnp.int32),
        stop_ids=jnp.full((n, _NUM_STOPS), NO_TOKEN, jnp.int32),
    )


def admission_size(slots: Slots) -> int:
    """Length of a `pack_admission` buffer."""
    return 1 + sum(array.shape[1] for array in slots)


def pack_admission(admission: Admission, used: Feature, max_model_len: int, max_pages: int) -> np.ndarray:
    """All of an admission but its `Options` in one int32 buffer (floats by their bits): one transfer.

    Layout: slot | history | block table | ints | stop ids | floats.

    Args:
      used: the request's `features`.
    """
    request, params = admission.request, admission.request.params
    buffer = np.zeros(1 + max_model_len + max_pages + len(_INTS) + _NUM_STOPS + len(_FLOATS), np.int32)
    buffer[0] = admission.slot
    buffer[1 : 1 + request.num_tokens] = request.all_token_ids
    at = 1 + max_model_len
    buffer[at : at + len(admission.block_ids)] = admission.block_ids
    at += max_pages
    seed = request.seed & 0xFFFFFFFFFFFFFFFF
    ints = {
        "features": used,
        "num_prompt_tokens": request.num_prompt_tokens,
        "sample_index": request.index,
        "min_total_tokens": request.num_prompt_tokens + params.min_tokens,
        "top_k": max(params.top_k, 0),
        "seed_high": _signed(seed >> 32),
        "seed_low": _signed(seed & 0xFFFFFFFF),
    }
    buffer[at : at + len(_INTS)] = [ints[name] for name in _INTS]
    at += len(_INTS)
    stops = sorted(request.eos_token_ids | request.stop_token_ids)
    assert len(stops) <= _NUM_STOPS
    buffer[at : at + _NUM_STOPS] = NO_TOKEN
    buffer[at : at + len(stops)] = stops
    buffer[at + _NUM_STOPS :].view(np.float32)[:] = [getattr(params, name) for name in _FLOATS]
    return buffer


def admit(slots: Slots, packed: jax.Array) -> Slots:
    """Writes one `pack_admission` buffer into its slot."""
    sizes = [1, *(array.shape[1] for array in (slots.history, slots.block_table, slots.ints, slots.stop_ids))]
    slot, history, block_table, ints, stop_ids, floats = jnp.split(packed, np.cumsum(sizes))
    parts = Slots(history, block_table, jax.lax.bitcast_convert_type(floats, jnp.float32), ints, stop_ids)
    # A scatter of one row would copy the array on CPU.
    return Slots(
        *(
            jax.lax.dynamic_update_slice(array, part[None], (slot[0], 0))
            for array, part in zip(slots, parts, strict=True)
        )
    )


def _signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word
