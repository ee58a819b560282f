"""How one request is sampled and when it ends. Every field is honoured or refused, never dropped."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from jaxpaged.core.parameter_checks import Check, boolean, instance, integer, integers, list_of, one_of, real, text
from jaxpaged.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_EOS_TOKEN_IDS = 16  # of a model
MAX_SAMPLES = 128  # n and best_of
MAX_BEAM_WIDTH = 64
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGIT_BIAS_VALUE = 100.0
GREEDY_TEMPERATURE = 1e-4  # at or below it sampling is greedy: division would only amplify rounding
ALL_LOGPROBS = -1

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1

# cumulative: each output holds everything so far. delta: what is new since the last one. final: one, at the end.
OutputKind = Literal["cumulative", "delta", "final"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the text must match; exactly one of the first five.

    Attributes:
      json: a JSON schema, as a dict or as text.
      json_object: any JSON object.
      regex: a regular expression that the whole text matches.
      choice: one of these texts.
      grammar: a context-free grammar, in Lark's or in EBNF (GBNF) notation.
      after: what may come before it: any text between these two marks; an empty first mark: a text that the prompt has
        begun, up to the second mark.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    after: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs takes exactly one of {', '.join(_FORMS)}, not {given}",
                param="structured_outputs",
            )

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(name for name in _FORMS if getattr(self, name) not in (None, False))


_FORMS = tuple(name for name in StructuredOutputs.__struct_fields__ if name != "after")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a request, named as in vLLM and the OpenAI API.

    Attributes:
      n: samples of the same prompt.
      best_of: draw this many and return the `n` most likely, by mean log-probability of a token. Default n.
      temperature: 0 (up to 1e-4) is greedy. Default 1.
      top_k: keep the k most likely tokens; -1, 0 or anything >= the vocabulary is off.
      top_p: keep the smallest set of most likely tokens with at least this mass; 1 is off, 0 is greedy.
      min_p: drop tokens less likely than `min_p` times the most likely one; 0 is off, 1 is greedy.
      seed: the same seed, prompt and parameters give the same tokens in any batch. None: drawn by the engine.
      presence_penalty: subtracted from the logit of each token that the output holds; -2 to 2.
      frequency_penalty: subtracted once for each time that the output holds it; -2 to 2.
      repetition_penalty: of tokens in prompt or output, divides positive logits and multiplies negative ones; 1 is off.
      logit_bias: token id -> what is added to its logit, -100 to 100.
      allowed_token_ids: nothing else is produced.
      bad_words: texts that the output does not hold in the tokens that spell them at the start of a text or behind a
        space; spelled with other tokens they may come.
      stop: strings that end the text. Beam search goes on: they only cut the texts that it found.
      include_stop_str_in_output: leave them, and a stop token's text, in it.
      stop_token_ids: token ids that end it, besides the model's EOS ids.
      ignore_eos: the model's EOS ids do not end it; `stop_token_ids` still do.
      min_tokens: neither EOS, stop ids nor stop strings end it before this many tokens.
      max_tokens: None: up to the model's context. 0, only with `prompt_logprobs`: score the prompt, generate nothing.
      timeout: seconds from arrival after which the request ends as it is, with finish_reason "abort".
      logprobs: None: none. k >= 0: the sampled token's log-probability, and the k most likely ones. -1: all.
      prompt_logprobs: the same of the prompt's tokens, always of the raw logits.
      logprob_token_ids: log-probabilities of these tokens, instead of the most likely ones.
      logprobs_mode: "raw_logprobs": of the model's logits; "processed_logprobs": of what was sampled from. None: as the
        engine says.
      structured_outputs: a grammar for the text.
      logits_processors: name of a registered processor -> its arguments by name.
      use_beam_search: search for the likeliest sequences instead of sampling; `n` are returned.
      beam_width: beams; default best_of or n.
      length_penalty: beams are compared by logprob / length ** length_penalty.
      early_stopping: end at once when `beam_width` beams have ended (True), when better ones are unlikely (False), or
        impossible ("never").
      detokenize: False leaves `text` empty (then what works on text is refused).
      skip_special_tokens: leave control tokens out of the text.
      shown_special_ids: control tokens that are text all the same.
      spaces_between_special_tokens: as the tokenizer writes them (True), or none (False).
      truncate_prompt_tokens: keep the last k prompt tokens (for an embedding, the first); -1: as many as the context
        holds beside `max_tokens`.
      output_kind: what a stream of outputs yields.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    timeout: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    logprobs_mode: LogprobsMode | None = None
    structured_outputs: StructuredOutputs | None = None
    logits_processors: dict[str, dict[str, Any]] | None = None
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    shown_special_ids: list[int] | None = None
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: OutputKind = "cumulative"

    def __post_init__(self) -> None:
        for name, check in _FIELDS.items():
            value = getattr(self, name)
            if value is not None or name in _NEVER_NONE:
                check(name, value)
        self._check_stop()
        self._check_tokens()
        self._check_samples()
        if self.use_beam_search:
            self._check_beams()
        else:
            self._check_no_beams()

    def _check_stop(self) -> None:
        for stop in self.stop_strings:
            text(MAX_STOP_STRING_CHARS)("stop", stop)
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop has {len(self.stop_strings)} strings, at most {MAX_STOP_STRINGS}", param="stop"
            )
        if self.stop_strings and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", param="stop")

    def _check_tokens(self) -> None:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidRequestError("max_tokens=0 generates nothing: it needs prompt_logprobs", param="max_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}", param="min_tokens"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("truncate_prompt_tokens=0 leaves no prompt", param="truncate_prompt_tokens")
        if self.logprob_token_ids is not None and self.logprobs is None:
            raise InvalidRequestError("logprob_token_ids needs logprobs", param="logprob_token_ids")

    def _check_samples(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError(f"best_of={self.best_of} is smaller than n={self.n}", param="best_of")
        if self.num_samples > self.n and self.output_kind == "delta":
            raise InvalidRequestError(
                f"best_of={self.best_of} cannot be streamed: the best are known at the end", param="best_of"
            )

    def _check_beams(self) -> None:
        """Beam search is deterministic and sees whole distributions: what samples or cuts them contradicts it."""
        if self.num_beams > MAX_BEAM_WIDTH or self.num_beams < self.n:
            raise InvalidRequestError(
                f"beam_width={self.num_beams} must be from n={self.n} to {MAX_BEAM_WIDTH}", param="beam_width"
            )
        if self.beam_width is not None and self.best_of not in (None, self.beam_width):
            raise InvalidRequestError(
                f"best_of={self.best_of} contradicts beam_width={self.beam_width}: give one of them", param="best_of"
            )
        if self.max_tokens == 0:
            raise InvalidRequestError("beam search with max_tokens=0 finds nothing", param="max_tokens")
        if self.temperature not in (0, 1):
            raise InvalidRequestError(f"beam search takes no temperature={self.temperature}", param="temperature")
        for name in _NOT_WITH_BEAMS:
            if getattr(self, name) != _DEFAULTS[name]:
                value = getattr(self, name)
                told = "" if isinstance(value, StructuredOutputs) else f"={value!r:.80}"
                raise InvalidRequestError(f"beam search takes no {name}{told}", param=name)

    def _check_no_beams(self) -> None:
        for name in _ONLY_WITH_BEAMS:
            if getattr(self, name) != _DEFAULTS[name]:
                raise InvalidRequestError(f"{name}={getattr(self, name)!r} needs use_beam_search", param=name)

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

    @property
    def num_samples(self) -> int:
        """Sequences that are drawn; beam search counts as one."""
        return 1 if self.use_beam_search else self.best_of or self.n

    @property
    def num_beams(self) -> int:
        """Beams of a beam search."""
        return self.beam_width or self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """How many most likely tokens each step must tell, -1 for all; None: no log-probabilities at all.

        Samples are compared by what their tokens' are. What a beam needs, the search asks for: `logprobs` of its own.
        """
        return 0 if self.logprobs is None and self.num_samples > self.n else self.logprobs


def logprob_columns(max_logprobs: int, vocab_size: int) -> int:
    """How many tokens' log-probabilities a step yields at most: also as many as beams need, or a request may name."""
    if max_logprobs == ALL_LOGPROBS:
        return vocab_size
    return min(max(max_logprobs, 2 * MAX_BEAM_WIDTH, MAX_LOGPROB_TOKEN_IDS), vocab_size)


def _text_or_texts(name: str, value: Any) -> None:
    if not isinstance(value, str):
        list_of(MAX_STOP_STRINGS, text(MAX_STOP_STRING_CHARS))(name, value)


def _logit_bias(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name}={value!r:.80} is not an object of token ids", param=name)
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(f"{name} has {len(value)} entries, at most {MAX_LOGIT_BIAS}", param=name)
    for token, bias in value.items():
        integer(0, _INT32)(name, token)
        real(-MAX_LOGIT_BIAS_VALUE, MAX_LOGIT_BIAS_VALUE)(name, bias)


def _processors(name: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(v, Mapping) for v in value.values()):
        raise InvalidRequestError(f"{name}={value!r:.80} is not an object of arguments by processor", param=name)


_token_ids = functools.partial(integers, low=0, high=_INT32)
_MAX_SHOWN_IDS = 64
_FIELDS: dict[str, Check] = {
    "n": integer(1, MAX_SAMPLES),
    "best_of": integer(1, MAX_SAMPLES),
    "temperature": real(0.0, 100.0),
    "top_k": integer(-1, _INT32),
    "top_p": real(0.0, 1.0),
    "min_p": real(0.0, 1.0),
    "seed": integer(-_INT64 - 1, _INT64),
    "presence_penalty": real(-2.0, 2.0),
    "frequency_penalty": real(-2.0, 2.0),
    "repetition_penalty": real(1e-3, 1e3),
    "logit_bias": _logit_bias,
    "allowed_token_ids": _token_ids(_INT32, least=1),
    "bad_words": list_of(MAX_BAD_WORDS, text(MAX_BAD_WORD_CHARS)),
    "stop": _text_or_texts,
    "stop_token_ids": _token_ids(MAX_STOP_TOKEN_IDS),
    "include_stop_str_in_output": boolean,
    "ignore_eos": boolean,
    "min_tokens": integer(0, _INT32),
    "max_tokens": integer(0, _INT32),
    "timeout": real(0.0, 1e9),
    "logprobs": integer(ALL_LOGPROBS, _INT32),
    "prompt_logprobs": integer(ALL_LOGPROBS, _INT32),
    "logprob_token_ids": _token_ids(MAX_LOGPROB_TOKEN_IDS, least=1),
    "logprobs_mode": one_of("raw_logprobs", "processed_logprobs"),
    "structured_outputs": instance(StructuredOutputs),
    "logits_processors": _processors,
    "use_beam_search": boolean,
    "beam_width": integer(1, MAX_BEAM_WIDTH),
    "length_penalty": real(-10.0, 10.0),
    "early_stopping": one_of(True, False, "never"),
    "detokenize": boolean,
    "skip_special_tokens": boolean,
    "shown_special_ids": _token_ids(_MAX_SHOWN_IDS),
    "spaces_between_special_tokens": boolean,
    "truncate_prompt_tokens": integer(-1, _INT32),
    "output_kind": one_of("cumulative", "delta", "final"),
}
_DEFAULTS = {f.name: f.default for f in msgspec.structs.fields(SamplingParams)}
_NEVER_NONE = frozenset(name for name, default in _DEFAULTS.items() if default is not None) - {"max_tokens"}
_NOT_WITH_BEAMS = ("top_k", "top_p", "min_p", "logprobs_mode", "logprob_token_ids", "structured_outputs")
_ONLY_WITH_BEAMS = ("beam_width", "length_penalty", "early_stopping")
