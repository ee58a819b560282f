"""How one request is sampled and when it ends. Every field is honoured or refused, never dropped."""

from __future__ import annotations

import math

import msgspec

from jaxpaged.errors import InvalidRequestError, UnsupportedError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
GREEDY_TEMPERATURE = 1e-4  # at or below it sampling is greedy: division would only amplify rounding

# Fields that exist so that they can be refused: name -> the neutral values that ask for nothing.
_NOT_YET = {
    "n": (1,),
    "best_of": (None, 1),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "prompt_logprobs": (None,),
    "use_beam_search": (False,),
    "structured_outputs": (None,),
    "logits_processors": (None, []),
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a request, named as in vLLM and the OpenAI API.

    Attributes:
      temperature: 0 (up to 1e-4) is greedy. Default 1.
      top_k: keep the k most likely tokens; -1, 0 or anything >= the vocabulary is off.
      top_p: keep the smallest set of most likely tokens with at least this mass; 1 is off, 0 is greedy.
      min_p: drop tokens less likely than `min_p` times the most likely one; 0 is off, 1 is greedy.
      seed: the same seed, prompt and parameters give the same tokens in any batch. None: drawn by the engine.
      stop: strings that end the text; cut out unless `include_stop_str_in_output`.
      stop_token_ids: token ids that end it, besides the model's EOS ids.
      ignore_eos: the model's EOS ids do not end it; `stop_token_ids` still do.
      min_tokens: neither EOS, stop ids nor stop strings end it before this many tokens.
      max_tokens: None: up to the model's context.
      logprobs: None: none. k >= 0: the sampled token's log-probability, and the k most likely ones.
      detokenize: False leaves `text` empty (then `stop` is refused).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    # Refused unless neutral, until they are built.
    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool = False
    structured_outputs: object | None = None
    logits_processors: list[object] | None = None

    def __post_init__(self) -> None:
        _real("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _real("top_p", self.top_p, 0.0, 1.0)
        _real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}", param="min_tokens"
                )
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, 2**31 - 1)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name}={getattr(self, name)!r} is not a bool", param=name)
        self._check_stop()
        for name, neutral in _NOT_YET.items():
            value = getattr(self, name)
            if not any(_same(value, v) for v in neutral):
                raise NotYetSupported(name, value)

    def _check_stop(self) -> None:
        if not isinstance(self.stop, (str, list, tuple, type(None))):
            raise InvalidRequestError(f"stop={self.stop!r} is neither text nor a list of texts", param="stop")
        if not isinstance(self.stop_token_ids, (list, tuple, type(None))):
            raise InvalidRequestError(f"stop_token_ids={self.stop_token_ids!r} is not a list", param="stop_token_ids")
        strings = self.stop_strings
        if len(strings) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop has {len(strings)} strings, at most {MAX_STOP_STRINGS}", param="stop")
        for s in strings:
            if not isinstance(s, str) or not 0 < len(s) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    f"stop string {str(s)[:40]!r} must be text of 1 to {MAX_STOP_STRING_CHARS} characters", param="stop"
                )
        if strings and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", param="stop")
        ids = self.stop_token_ids or []
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(ids)} ids, at most {MAX_STOP_TOKEN_IDS}", param="stop_token_ids"
            )
        for i in ids:
            _integer("stop_token_ids", i, 0, 2**31 - 1)

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p == 0.0 or self.min_p == 1.0


class NotYetSupported(InvalidRequestError, UnsupportedError):
    """A parameter of the field's standard set that this version does not implement."""

    def __init__(self, name: str, value: object):
        super().__init__(f"{name}={value!r} is not supported yet", param=name)


def _same(value: object, neutral: object) -> bool:
    """Equality, but `True` is not 1, and an array, which compares element by element, equals nothing."""
    return type(value) in (type(neutral), int if isinstance(neutral, float) else type(neutral)) and value == neutral


def _real(name: str, value: object, low: float, high: float) -> None:
    # `low <= x <= high` is false for NaN; bool is a number to Python but a mistake here.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidRequestError(f"{name}={value!r} must be a number from {low:g} to {high:g}", param=name)
    assert math.isfinite(value)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{name}={value!r} must be an integer from {low} to {high}", param=name)
