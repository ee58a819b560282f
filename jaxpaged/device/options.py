"""Sampling options that few requests use and that need much room: per-slot arrays which only such requests write.

Nobody reads a slot's row unless the `Feature`s of its request say so: what an earlier one left there does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS
from jaxpaged.device.logits_processor import LogitsProcessor, pack_arguments
from jaxpaged.device.slots import NO_TOKEN
from jaxpaged.errors import InvalidRequestError

MAX_BAD_WORD_TOKENS = 1024


class Options(NamedTuple):
    """A row a slot, plus one that belongs to no request; lists are padded with NO_TOKEN.

    Attributes:
      bias_ids, bias_values: i32/f32[slots + 1, MAX_LOGIT_BIAS].
      allowed: i32[slots + 1, ceil(V / 32)]; bit i of word w stands for token 32 w + i.
      bad_tokens: i32[slots + 1, MAX_BAD_WORD_TOKENS], the tokens of all bad words, one word after the other.
      bad_left: likewise, how many tokens of its word come after each.
      logprob_ids: i32[slots + 1, MAX_LOGPROB_TOKEN_IDS].
      applies: i32[slots + 1, P], which processors run.
      arguments: f32[slots + 1, A], theirs.
    """

    bias_ids: jax.Array
    bias_values: jax.Array
    allowed: jax.Array
    bad_tokens: jax.Array
    bad_left: jax.Array
    logprob_ids: jax.Array
    applies: jax.Array
    arguments: jax.Array


def empty_options(num_slots: int, vocab_rows: int, processors: Sequence[LogitsProcessor] = ()) -> Options:
    """Options of nobody.

    Args:
      vocab_rows: V, rows of the head.
    """

    def zeros(width: int, dtype: jnp.dtype | type = jnp.int32) -> jax.Array:
        return jnp.zeros((num_slots + 1, width), dtype)

    return Options(
        bias_ids=zeros(MAX_LOGIT_BIAS),
        bias_values=zeros(MAX_LOGIT_BIAS, jnp.float32),
        allowed=zeros(mask_words(vocab_rows)),
        bad_tokens=zeros(MAX_BAD_WORD_TOKENS),
        bad_left=zeros(MAX_BAD_WORD_TOKENS),
        logprob_ids=zeros(MAX_LOGPROB_TOKEN_IDS),
        applies=zeros(len(processors)),
        arguments=zeros(sum(p.num_floats for p in processors), jnp.float32),
    )


def mask_words(vocab_rows: int) -> int:
    """W, the words of a bit mask over the vocabulary."""
    return -(-vocab_rows // 32)


def options_size(options: Options) -> int:
    """Length of a `pack_options` buffer."""
    return sum(array.shape[1] for array in options)


def pack_options(request: Request, vocab_rows: int, processors: Sequence[LogitsProcessor] = ()) -> np.ndarray | None:
    """A request's row of all options in one int32 buffer (floats by their bits); None if it uses none.

    The ids are taken to be in the vocabulary.

    Raises InvalidRequestError for what does not fit.
    """
    params = request.params
    if not (
        params.logit_bias
        or params.allowed_token_ids is not None
        or request.bad_word_ids
        or params.logprob_token_ids
        or params.logits_processors
    ):
        return None
    bias = params.logit_bias or {}
    applies, arguments = pack_arguments(processors, params.logits_processors or {})
    bad_tokens, bad_left = _bad_words(request.bad_word_ids)
    parts = {
        "bias_ids": _padded(list(bias), MAX_LOGIT_BIAS, "logit_bias"),
        "bias_values": _padded(list(bias.values()), MAX_LOGIT_BIAS, "logit_bias", np.float32),
        "allowed": _bit_mask(params.allowed_token_ids or (), vocab_rows),
        "bad_tokens": bad_tokens,
        "bad_left": bad_left,
        "logprob_ids": _padded(params.logprob_token_ids or [], MAX_LOGPROB_TOKEN_IDS, "logprob_token_ids"),
        "applies": applies,
        "arguments": arguments,
    }
    return np.concatenate([parts[name].view(np.int32) for name in Options._fields])


def admit_options(options: Options, slot: jax.Array, packed: jax.Array) -> Options:
    """Writes a `pack_options` buffer into the row of `slot` (i32[])."""
    parts = jnp.split(packed, np.cumsum([array.shape[1] for array in options])[:-1])
    # A scatter of one row would copy the array on CPU.
    return Options(
        *(
            jax.lax.dynamic_update_slice(array, jax.lax.bitcast_convert_type(part, array.dtype)[None], (slot, 0))
            for array, part in zip(options, parts, strict=True)
        )
    )


def _padded(values: Sequence[float], length: int, name: str, dtype: type = np.int32) -> np.ndarray:
    if len(values) > length:
        raise InvalidRequestError(f"{name} has {len(values)} entries, at most {length}", param=name)
    row = np.full(length, NO_TOKEN if dtype is np.int32 else 0, dtype)
    row[: len(values)] = values
    return row


def _bit_mask(ids: Sequence[int], vocab_rows: int) -> np.ndarray:
    bits = np.zeros(32 * mask_words(vocab_rows), np.uint8)
    bits[np.asarray(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _bad_words(words: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of all words in a row, and for each how many follow it in its word."""
    total = sum(map(len, words))
    if total > MAX_BAD_WORD_TOKENS:
        raise InvalidRequestError(f"bad_words are {total} tokens, at most {MAX_BAD_WORD_TOKENS}", param="bad_words")
    if not all(len(word) for word in words):
        raise InvalidRequestError("bad_words holds a word without tokens", param="bad_words")
    tokens = np.full(MAX_BAD_WORD_TOKENS, NO_TOKEN, np.int32)
    left = np.zeros(MAX_BAD_WORD_TOKENS, np.int32)
    tokens[:total] = [token for word in words for token in word]
    left[:total] = [n for word in words for n in range(len(word) - 1, -1, -1)]
    return tokens, left
