"""What a request may ask of one engine: checks that need its vocabulary, its context and its options."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from numbers import Integral
from typing import Any

import msgspec
import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.core.pooling_params import POOLING_KINDS, PoolingParams
from jaxpaged.core.request import Grammar, Request
from jaxpaged.core.sampling_params import ALL_LOGPROBS, MAX_EOS_TOKEN_IDS, SamplingParams, logprob_columns
from jaxpaged.engine.engine_facts import EngineFacts
from jaxpaged.errors import InvalidRequestError, RequestTooLargeError, UnsupportedError

_INT32 = 2**31
_DEFAULT_PARAMS = SamplingParams()
_WITH_POOLING = frozenset({"truncate_prompt_tokens", "timeout", "max_tokens", "detokenize", "output_kind"})


def checked_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    facts: EngineFacts,
    *,
    params_are_checked: bool = False,
    bad_word_ids: Sequence[Sequence[int]] = (),
    cache_salt: str | None = None,
    priority: int = 0,
    pooling: PoolingParams | None = None,
    end_ids: Container[int] = (),
    grammar: Grammar | None = None,
    seed: int = 0,
    arrival_time: float | None = None,
) -> Request:
    """A request that this engine can take, as far as it can be told without its blocks.

    Args:
      facts: of the engine.
      params_are_checked: with this `bad_word_ids`, by `check_params`.
      end_ids: as for `checked_prompt`.
      grammar, seed, arrival_time: as for `Request`, without a check.

    Raises:
      InvalidRequestError: empty prompt, an id outside the vocabulary, a parameter out of this engine's range.
      RequestTooLargeError: no room for one token after the prompt in the context.
      UnsupportedError: the model's own way of pooling is wanted, and it is none that we have.
    """
    config = facts.config
    assert config.max_model_len is not None
    check_scheduling(priority, cache_salt, config)
    if not params_are_checked:
        check_params(params, config, facts.vocab_size, bad_word_ids)
    if pooling is not None:
        pooling = checked_pooling(pooling, params, hidden_size=facts.hidden_size, default=facts.pooling)
    generates = pooling is None
    return Request(
        request_id,
        checked_prompt(prompt_token_ids, params, config, facts.vocab_size, generates=generates, end_ids=end_ids),
        params,
        max_model_len=config.max_model_len,
        eos_token_ids=facts.eos_token_ids,
        cache_salt=cache_salt,
        priority=priority,
        bad_word_ids=bad_word_ids,
        pooling=pooling,
        grammar=grammar,
        seed=seed,
        arrival_time=arrival_time,
    )


def checked_prompt(
    token_ids: Sequence[int],
    params: SamplingParams,
    config: EngineConfig,
    vocab_size: int,
    *,
    generates: bool = True,
    end_ids: Container[int] = (),
) -> list[int]:
    """The prompt, cut if `truncate_prompt_tokens` says so: to its last tokens; for a vector to its first.

    Args:
      generates: there must be room for a token after it. False: for a vector.
      end_ids: if one of these ends what is cut for a vector, it still does: models are trained with it.

    Raises:
      InvalidRequestError: it is empty, or holds what is no token id.
      RequestTooLargeError: it is too long.
    """
    limit = config.max_model_len
    assert limit is not None
    check_token_ids(token_ids, vocab_size)
    prompt = list(token_ids)
    if params.truncate_prompt_tokens is not None:
        keep = params.truncate_prompt_tokens
        if keep < 0:
            keep = max(limit - max(params.max_tokens or 1, 1), 1) if generates else limit
        if generates:
            prompt = prompt[-keep:]
        elif len(prompt) > keep:
            end = prompt[-1:] if prompt[-1] in end_ids else []
            prompt = prompt[: keep - len(end)] + end
    if len(prompt) + generates > limit:
        with_one = " with at least one generated token" if generates else ""
        raise RequestTooLargeError(
            f"the prompt has {len(prompt)} tokens, but the context holds {limit}{with_one}", param="prompt"
        )
    return prompt


def as_token_ids(prompt: Any) -> list[int]:
    """Token ids as a list of Python values, of an array or a sequence; `check_token_ids` looks at the values.

    Raises:
      InvalidRequestError: it is no such thing.
    """
    if hasattr(prompt, "__array__"):
        array = np.asarray(prompt)
        if array.ndim != 1:
            raise InvalidRequestError(f"a prompt of token ids is flat, not of shape {array.shape}", param="prompt")
        return array.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise InvalidRequestError(f"prompt {prompt!r:.80} is neither text nor a list of token ids", param="prompt")
    return list(prompt)


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequestError naming the first value that is not a token id.

    On the device an id out of range would be clamped or wrapped silently.
    """
    if len(token_ids) == 0:
        raise InvalidRequestError("the prompt is empty: it needs at least one token", param="prompt")
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return  # as good as always, and many times as fast
    for token in token_ids:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"the prompt holds {token!r}, which is not a token id from 0 to {vocab_size - 1}", param="prompt"
            )


def check_params(
    params: SamplingParams, config: EngineConfig, vocab_size: int, bad_word_ids: Sequence[Sequence[int]] = ()
) -> None:
    """Raises InvalidRequestError naming a parameter that is out of this engine's range."""
    _check_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
    _check_ids("logit_bias", params.logit_bias or (), vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_ids("logprob_token_ids", params.logprob_token_ids or (), vocab_size)
    for sequence in bad_word_ids:
        _check_ids("bad_words", sequence, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        _check_logprobs(name, getattr(params, name), config.max_logprobs, vocab_size)
    if params.use_beam_search:
        _check_candidates(params, config.max_logprobs, vocab_size)


def checked_pooling(pooling: PoolingParams, params: SamplingParams, *, hidden_size: int, default: str) -> PoolingParams:
    """`pooling` with the model's own kind filled in, where none is asked for.

    Args:
      default: the model's own kind, which may be one that is not supported.

    Raises:
      InvalidRequestError: more dimensions than the model has, or a parameter that means nothing to a vector.
      UnsupportedError: the model's kind is to be used, and there is none such here.
    """
    kind = pooling.pooling or default
    if kind not in POOLING_KINDS:
        known = " or ".join(map(repr, POOLING_KINDS))
        raise UnsupportedError(f"this model pools by {kind!r}, which is not supported: ask for pooling={known}")
    if pooling.dimensions is not None and pooling.dimensions > hidden_size:
        raise InvalidRequestError(
            f"dimensions={pooling.dimensions} is more than the {hidden_size} of this model", param="dimensions"
        )
    for name in params.__struct_fields__:
        if name not in _WITH_POOLING and getattr(params, name) != getattr(_DEFAULT_PARAMS, name):
            raise InvalidRequestError(f"an embedding takes no {name}={getattr(params, name)!r:.80}", param=name)
    return msgspec.structs.replace(pooling, pooling=kind)


def check_scheduling(priority: int, cache_salt: str | None, config: EngineConfig) -> None:
    """Raises InvalidRequestError for a priority that is no 32-bit integer or that this engine does not heed.

    Likewise for an empty salt, which protects nobody.
    """
    if isinstance(priority, bool) or not isinstance(priority, int) or not -_INT32 <= priority < _INT32:
        raise InvalidRequestError(f"priority={priority!r:.80} is not a 32-bit integer", param="priority")
    if priority and config.scheduling_policy != "priority" and config.scheduling_key is None:
        raise InvalidRequestError(
            f"priority={priority} is not heeded by an engine with scheduling_policy={config.scheduling_policy!r}: "
            f'"priority" heeds it',
            param="priority",
        )
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise InvalidRequestError(f"cache_salt={cache_salt!r:.80} is not a non-empty string", param="cache_salt")


def _check_candidates(params: SamplingParams, max_logprobs: int, vocab_size: int) -> None:
    """Raises InvalidRequestError if a step gives too few candidates a beam: those that end it do not go on."""
    if params.num_beams > vocab_size:
        raise InvalidRequestError(
            f"beam_width={params.num_beams} is more than the vocabulary of {vocab_size}", param="beam_width"
        )
    wanted = params.num_beams + len(params.stop_token_ids or ()) + MAX_EOS_TOKEN_IDS
    if wanted > (columns := logprob_columns(max_logprobs, vocab_size)) and columns < vocab_size:
        raise InvalidRequestError(
            f"beam_width={params.num_beams} with {len(params.stop_token_ids or ())} stop_token_ids may need {wanted} "
            f"candidates a beam, more than the {columns} of this engine",
            param="stop_token_ids",
        )


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(f"{name} holds {token}, outside the vocabulary of {vocab_size}", param=name)


def _check_logprobs(name: str, asked: int | None, max_logprobs: int, vocab_size: int) -> None:
    if asked is None or asked == max_logprobs == ALL_LOGPROBS:
        return
    if asked == ALL_LOGPROBS:
        raise InvalidRequestError(
            f"{name}=-1, all of the vocabulary, exceeds max_logprobs={max_logprobs} of this engine", param=name
        )
    most = vocab_size if max_logprobs == ALL_LOGPROBS else max_logprobs
    if asked > most:
        raise InvalidRequestError(f"{name}={asked} exceeds max_logprobs={most}", param=name)
