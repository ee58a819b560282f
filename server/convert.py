"""From request bodies to sampling parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxpaged.core.sampling_params import ALL_LOGPROBS, SamplingParams
from jaxpaged.errors import InvalidRequestError
from server.generation_defaults import with_defaults
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.generation import GenerationRequest
from server.protocol.structured import structured_field, structured_outputs

COMPLETION_MAX_TOKENS = 16  # OpenAI's default; chat goes on to the end of the context
MAX_SEQUENCES = 1024  # prompts x samples (or beams) of one HTTP request: they start, and are aborted, in one go

_SAME_NAME = (
    "n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "timeout", "prompt_logprobs", "logprob_token_ids",
    "logprobs_mode", "logits_processors", "use_beam_search", "beam_width", "length_penalty", "early_stopping",
    "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens",
)  # fmt: skip
_ABSENT_IF_EMPTY = ("logit_bias", "bad_words", "logits_processors")


def sampling_params(body: GenerationRequest, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """Sampling parameters of a body.

    Args:
      defaults: of what the body leaves out; a resolved `ServerConfig.override_generation_config`.

    Raises:
      InvalidRequestError: the field is named as SamplingParams names it; see `named_as_sent`.
    """
    params: dict[str, Any] = {name: v for name in _SAME_NAME if (v := getattr(body, name)) is not None}
    for name in _ABSENT_IF_EMPTY:
        if name in params and not params[name]:
            del params[name]
    form = structured_outputs(body)
    if form is not None:
        params["structured_outputs"] = form
    specific = _chat_params(body) if isinstance(body, ChatCompletionRequest) else _completion_params(body)
    params = with_defaults({**params, **specific}, defaults or {})
    made = SamplingParams(**params, output_kind="delta" if body.stream else "final")
    _check_sequences(len(body.prompt) if isinstance(body, CompletionRequest) else 1, made)
    return made


def _check_sequences(num_prompts: int, params: SamplingParams) -> None:
    """Raises InvalidRequestError if prompts and their samples, or beams, are too many together."""
    beams = params.use_beam_search
    each = params.num_beams if beams else params.num_samples
    if num_prompts * each <= MAX_SEQUENCES:
        return
    kind = "beams" if beams else "samples"
    raise InvalidRequestError(
        f"{num_prompts} prompts with {each} {kind} each are more than {MAX_SEQUENCES} sequences",
        param="beam_width" if beams and params.beam_width else "n" if each == params.n else "best_of",
    )


def _completion_params(body: GenerationRequest) -> dict[str, Any]:
    assert isinstance(body, CompletionRequest)
    params: dict[str, Any] = {
        "max_tokens": COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        "logprobs": body.logprobs,
    }
    if body.echo and (body.logprobs is not None or body.max_tokens == 0):
        # Both may be given: what is asked for least is cut from the other.
        asked = [k for k in (body.logprobs, body.prompt_logprobs) if k is not None] or [0]
        params["prompt_logprobs"] = ALL_LOGPROBS if ALL_LOGPROBS in asked else max(asked)
    return params


def _chat_params(body: ChatCompletionRequest) -> dict[str, Any]:
    return {
        "max_tokens": body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }


@contextmanager
def named_as_sent(body: GenerationRequest) -> Iterator[None]:
    """Errors about sampling parameters name the fields that the client sent."""
    try:
        yield
    except InvalidRequestError as e:
        name = _sent_names(body).get(e.param or "")
        if name not in (None, e.param):
            part = r"(\.\w+)?" if e.param == "structured_outputs" else ""  # the field that was sent says which
            e.args = (re.sub(rf"\b{e.param}\b{part}", name, str(e)),)
            e.param = name
        raise


def _sent_names(body: GenerationRequest) -> dict[str, str]:
    """Sampling parameter -> the field it came from, where these differ."""
    names: dict[str, str] = {}
    if isinstance(body, ChatCompletionRequest):
        names["logprobs"] = "top_logprobs"
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    elif body.prompt_logprobs is None:
        names["prompt_logprobs"] = "logprobs"
    names["structured_outputs"] = structured_field(body) or "structured_outputs"
    if isinstance(body, ChatCompletionRequest) and body.forces_call:
        names["structured_outputs"] = "tools"
    return names
