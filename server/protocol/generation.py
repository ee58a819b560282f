"""What a request to generate may say, on either endpoint."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from jaxpaged.core.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    LogprobsMode,
)
from server.errors import shown
from server.protocol.body import EngineBody, Strict
from server.protocol.fields import invalid
from server.protocol.refused import NOT_YET
from server.protocol.structured import StructuredFields

MAX_ALLOWED_TOKEN_IDS = 1 << 18  # the largest vocabularies
MAX_PROCESSORS = 64

StopStrings = Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
BadWords = Annotated[list[str], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]
StopIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
AllowedIds = Annotated[list[int], Field(max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)]
LogprobIds = Annotated[list[int], Field(max_length=MAX_LOGPROB_TOKEN_IDS, fail_fast=True)]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]


def _logit_bias(value: Any) -> Any:
    """Token ids as numbers: keys of JSON are text. `SamplingParams` checks the values."""
    if not isinstance(value, dict):
        return value  # refused by its type
    if len(value) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"logit_bias has {len(value)} entries, at most {MAX_LOGIT_BIAS}")
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid("logit_bias", f"logit_bias holds {key!r:.60}, which is not a token id")
    biases = {int(key): bias for key, bias in value.items()}
    if len(biases) < len(value):
        raise invalid("logit_bias", "logit_bias holds a token id twice")
    return biases


LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]


def _processors(value: Any) -> Any:
    if isinstance(value, dict):
        if len(value) > MAX_PROCESSORS:
            raise invalid("logits_processors", f"logits_processors has {len(value)} entries, at most {MAX_PROCESSORS}")
        for name, arguments in value.items():
            if not isinstance(arguments, dict):
                message = f"logits_processors.{name:.80}: {shown(arguments)} is not an object of its arguments"
                raise invalid("logits_processors", message)
    return value


Processors = Annotated[dict[str, dict[str, Any]], BeforeValidator(_processors)]


class StreamOptions(Strict):
    """What a stream carries beside the text."""

    include_usage: bool | None = Field(None, description="A last chunk with the totals of the request.")
    continuous_usage_stats: bool | None = Field(None, description="Totals so far on every chunk.")
    include_obfuscation: bool | None = Field(None, description="Ignored: no chunk is ever padded.")


class GenerationRequest(EngineBody, StructuredFields):
    """What both endpoints take."""

    not_yet = NOT_YET

    stream: bool | None = Field(None, description="Answer in server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="What a stream carries beside the text.")
    stream_interval: int | None = Field(
        None, ge=1, le=2**31 - 1, description="Ignored: a stream goes as its tokens come."
    )
    store: bool | None = Field(None, description="Ignored: nothing is stored.")
    max_tokens: int | None = Field(
        None, description="Most tokens to generate; what would exceed the context is cut to it. Default: all of it."
    )
    temperature: float | None = Field(None, description="0 is greedy. Default 1.")
    top_p: float | None = Field(None, description="Keep the most likely tokens of this mass. Default 1: all.")
    top_k: int | None = Field(None, description="Keep this many most likely tokens. Default 0: all.")
    min_p: float | None = Field(None, description="Drop tokens less likely than this share of the likeliest.")
    seed: int | None = Field(None, description="The same seed gives the same tokens.")
    n: int | None = Field(None, description="Samples of each prompt. Default 1.")
    best_of: int | None = Field(None, description="Draw this many, return the `n` likeliest. Not with `stream`.")
    presence_penalty: float | None = Field(None, description="Against tokens that the output holds; -2 to 2.")
    frequency_penalty: float | None = Field(None, description="The same, for each time it does; -2 to 2.")
    repetition_penalty: float | None = Field(None, description="Against tokens of prompt and output; 1 is off.")
    logit_bias: LogitBias | None = Field(None, description="Token id -> added to its logit, -100 to 100.")
    allowed_token_ids: AllowedIds | None = Field(None, description="No other token is produced.")
    bad_words: BadWords | None = Field(None, description="Texts that the output does not hold.")
    stop: str | StopStrings | None = Field(None, description="Strings that end the text.")
    stop_token_ids: StopIds | None = Field(None, description="Token ids that end the text.")
    include_stop_str_in_output: bool | None = Field(None, description="Leave the stop string in the text.")
    ignore_eos: bool | None = Field(None, description="Go on after the model's end-of-sequence tokens.")
    min_tokens: int | None = Field(
        None,
        description="Do not end before this many tokens; a text that is complete by its grammar ends all the same.",
    )
    skip_special_tokens: bool | None = Field(None, description="Leave control tokens out of the text. Default true.")
    spaces_between_special_tokens: bool | None = Field(None, description="As the tokenizer writes them. Default true.")
    truncate_prompt_tokens: int | None = Field(None, description="Keep the last tokens of the prompt; -1: what fits.")
    timeout: float | None = Field(None, description="Seconds after which the request ends, with reason `abort`.")
    prompt_logprobs: int | None = Field(None, description="Logprobs of the prompt, with this many likeliest tokens.")
    logprob_token_ids: LogprobIds | None = Field(None, description="Logprobs of these tokens, not the likeliest.")
    logprobs_mode: LogprobsMode | None = Field(None, description="`raw`: the model's; `processed`: as sampled from.")
    logits_processors: Processors | None = Field(
        None, description="Name of a processor that the server has -> its arguments."
    )
    use_beam_search: bool | None = Field(None, description="Search the likeliest texts; `n` are returned.")
    beam_width: int | None = Field(None, description="Beams. Default best_of or n.")
    length_penalty: float | None = Field(None, description="Beams compare by logprob / length ** length_penalty.")
    early_stopping: bool | Literal["never"] | None = Field(None, description="When a beam search ends.")
    return_token_ids: bool | None = Field(None, description="Give the token ids of prompt and output.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Name tokens `token_id:123` in logprobs.")
    service_tier: ServiceTier | None = Field(None, description="There is one tier, `default`, whatever is asked for.")
    session_id: str | None = Field(None, description="Ignored: prefixes are cached by their content.")
    safety_identifier: str | None = Field(None, description="Ignored.")
    prompt_cache_key: str | None = Field(None, description="Ignored: prefixes are cached by their content.")
    prompt_cache_retention: str | None = Field(None, description="Ignored.")
    metadata: dict[str, Any] | None = Field(None, description="Ignored: nothing is stored.")

    @model_validator(mode="after")
    def _some_need_a_stream_and_some_none(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options is only allowed with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "prompt_logprobs cannot be streamed")
        return self
