"""What the device keeps of each running request between steps: its tokens, its blocks, its sampling parameters.

A request takes a slot when it is admitted and keeps it while it runs. Its tokens are uploaded once; sampled ones
are appended on the device, so that the next step needs no round trip to the host.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.core.sampling_params import MAX_STOP_TOKEN_IDS
from jaxpaged.core.step import Admission

MAX_EOS_TOKEN_IDS = 16
NO_TOKEN = 2**31 - 1  # outside every vocabulary: scatters drop it

_FLOATS = ("temperature", "top_p", "min_p")
_INTS = ("min_total_tokens", "top_k", "seed_high", "seed_low", "greedy", "wants_logprobs")
_NUM_STOPS = MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS


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
        """Sampling parameter `name` of the given slots."""
        if name in _FLOATS:
            return self.floats[rows, _FLOATS.index(name)]
        return self.ints[rows, _INTS.index(name)]


def empty_slots(num_slots: int, max_model_len: int, max_pages: int) -> Slots:
    """Empty state for `num_slots` requests and the padding row, which is greedy: it never makes a step sample."""
    n = num_slots + 1
    return Slots(
        history=jnp.zeros((n, max_model_len), jnp.int32),
        block_table=jnp.zeros((n, max_pages), jnp.int32),
        floats=jnp.ones((n, len(_FLOATS)), jnp.float32).at[:, _FLOATS.index("min_p")].set(0),
        ints=jnp.zeros((n, len(_INTS)), jnp.int32).at[:, _INTS.index("greedy")].set(1),
        stop_ids=jnp.full((n, _NUM_STOPS), NO_TOKEN, jnp.int32),
    )


def pack_admission(admission: Admission, max_model_len: int, max_pages: int) -> np.ndarray:
    """All of an admission in one int32 buffer (floats by their bits): one transfer.

    Layout: slot | history | block table | ints | stop ids | floats.
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
        "min_total_tokens": request.num_prompt_tokens + params.min_tokens,
        "top_k": max(params.top_k, 0),
        "seed_high": _signed(seed >> 32),
        "seed_low": _signed(seed & 0xFFFFFFFF),
        "greedy": params.greedy,
        "wants_logprobs": params.logprobs is not None,
    }
    buffer[at : at + len(_INTS)] = [ints[name] for name in _INTS]
    at += len(_INTS)
    stops = sorted(request.eos_token_ids | request.stop_token_ids)
    assert len(stops) <= _NUM_STOPS
    buffer[at : at + _NUM_STOPS] = NO_TOKEN
    buffer[at : at + len(stops)] = stops
    buffer[at + _NUM_STOPS :] = np.array([getattr(params, name) for name in _FLOATS], np.float32).view(np.int32)
    return buffer


def admit(slots: Slots, packed: jax.Array) -> Slots:
    """Writes one `pack_admission` buffer into its slot."""
    sizes = [1, *(array.shape[1] for array in (slots.history, slots.block_table, slots.ints, slots.stop_ids))]
    slot, history, block_table, ints, stop_ids, floats = jnp.split(packed, np.cumsum(sizes))
    slot = slot[0]
    return Slots(
        history=slots.history.at[slot].set(history),
        block_table=slots.block_table.at[slot].set(block_table),
        floats=slots.floats.at[slot].set(jax.lax.bitcast_convert_type(floats, jnp.float32)),
        ints=slots.ints.at[slot].set(ints),
        stop_ids=slots.stop_ids.at[slot].set(stop_ids),
    )


def _signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word
