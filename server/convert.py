"""From request bodies to sampling parameters, and from outputs to response bodies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.output import CompletionOutput, PositionLogprobs, RequestOutput, TokenLogprob
from jaxpaged.errors import InvalidRequestError
from server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest

COMPLETION_MAX_TOKENS = 16  # OpenAI's default; chat goes on to the end of the context
LOWEST_LOGPROB = -9999.0  # JSON has no -inf

_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "min_tokens", "skip_special_tokens",
)  # fmt: skip


def completion_params(body: CompletionRequest) -> SamplingParams:
    """Sampling parameters of a completion; InvalidRequestError names the field."""
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return SamplingParams(**_common(body), max_tokens=max_tokens, logprobs=body.logprobs)


def chat_params(body: ChatCompletionRequest, max_logprobs: int) -> SamplingParams:
    """Sampling parameters of a chat turn.

    Args:
      max_logprobs: the engine's limit, checked here because the field has another name.
    """
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if logprobs is not None and not 0 <= logprobs <= max_logprobs:
        raise InvalidRequestError(f"top_logprobs={logprobs} must be from 0 to {max_logprobs}", param="top_logprobs")
    if body.max_completion_tokens is None:
        return SamplingParams(**_common(body), max_tokens=body.max_tokens, logprobs=logprobs)
    try:
        return SamplingParams(**_common(body), max_tokens=body.max_completion_tokens, logprobs=logprobs)
    except InvalidRequestError as e:
        if e.param != "max_tokens":
            raise
        name = "max_completion_tokens"
        raise InvalidRequestError(str(e).replace("max_tokens", name), param=name) from e


def _common(body: GenerationRequest) -> dict[str, Any]:
    given = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    return {**given, "output_kind": "delta" if body.stream else "final"}


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request, which may hold several prompts; filled from deltas or from final outputs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    _seen: set[int] = field(default_factory=set)

    def add(self, index: int, output: RequestOutput) -> None:
        """Counts an output of the prompt with this index."""
        if index not in self._seen:
            self._seen.add(index)
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens
        self.completion_tokens += sum(len(c.token_ids) for c in output.outputs)

    def to_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class LogprobFormat:
    """Logprobs as JSON, in the two forms of the API.

    A token whose bytes are no characters is named after its bytes ("bytes:\\xf0\\x9f"), and names that two tokens of
    one position share are told apart by id, so that no entry of an object keyed by name is lost.
    """

    def __init__(self, *, as_ids: bool, hidden_ids: frozenset[int]):
        """
        Args:
          as_ids: name every token "token_id:123".
          hidden_ids: tokens that never become text: they are named, but have no bytes.
        """
        self._as_ids, self._hidden_ids = as_ids, hidden_ids

    def chat(self, positions: Sequence[PositionLogprobs], *, last_is_hidden: bool) -> dict[str, Any]:
        """The object of /v1/chat/completions.

        The bytes of the sampled tokens join to the text. So a token that is no part of it has none.

        Args:
          last_is_hidden: the last position is the token that ended the text.
        """
        content = [{**self._chat_entry(p), "top_logprobs": [self._chat_entry(t) for t in p.top]} for p in positions]
        if last_is_hidden and content:
            content[-1]["bytes"] = []
        return {"content": content, "refusal": None}

    def completion(
        self, positions: Sequence[PositionLogprobs], num_chars: int | None, with_top: bool
    ) -> dict[str, Any]:
        """The object of /v1/completions.

        Args:
          num_chars: length of the whole text if it is known: offsets end there.
          with_top: give the most likely tokens: `logprobs` is 1 or more.
        """
        limit = math.inf if num_chars is None else num_chars
        return {
            "text_offset": [min(p.text_offset, limit) for p in positions],
            "token_logprobs": [_finite(p.logprob) for p in positions],
            "tokens": [self._name(p) for p in positions],
            "top_logprobs": [self._top(p) for p in positions] if with_top else None,
        }

    def _chat_entry(self, token: TokenLogprob) -> dict[str, Any]:
        name = f"token_id:{token.token_id}" if self._as_ids else token.token
        raw = [] if token.token_id in self._hidden_ids else list(token.bytes)
        return {"token": name, "logprob": _finite(token.logprob), "bytes": raw}

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """The most likely tokens and the sampled one."""
        entries: dict[str, float] = {}
        seen: set[int] = set()
        for token in (*position.top, position):
            if token.token_id not in seen:
                seen.add(token.token_id)
                name = self._name(token)
                entries[f"token_id:{token.token_id}" if name in entries else name] = _finite(token.logprob)
        return entries

    def _name(self, token: TokenLogprob) -> str:
        if self._as_ids:
            return f"token_id:{token.token_id}"
        try:
            return token.bytes.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


def _finite(logprob: float) -> float:
    # `max` would keep a NaN, and JSON has none.
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def last_is_hidden(completion: CompletionOutput, params: SamplingParams) -> bool:
    """Whether the last token ended the text as an EOS or stop id, and so is no part of it."""
    by_token = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
    return by_token and not params.include_stop_str_in_output


def total_usage(outputs: Iterable[RequestOutput]) -> Usage:
    """Usage of finished outputs, one a prompt."""
    usage = Usage()
    for index, output in enumerate(outputs):
        usage.add(index, output)
    return usage
