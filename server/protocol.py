"""The request bodies of the OpenAI API, with vLLM's extra fields.

Numbers are strict: `true` and `"1"` are none, NaN and infinity are refused. A field that we do not know is refused;
one that we know but have not built is accepted only with a value that asks for nothing. `null` means absent.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jaxpaged.core.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    LogprobsMode,
)
from server.errors import shown
from server.refused import NOT_YET, NOT_YET_CHAT, NOT_YET_COMPLETION, first_refused
from server.structured import StructuredFields

MAX_PROMPTS = 1024
MAX_MESSAGES = 16384
MAX_ALLOWED_TOKEN_IDS = 1 << 18  # the largest vocabularies
_INT32 = 2**31 - 1

StopStrings = Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
BadWords = Annotated[list[str], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]
StopIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
AllowedIds = Annotated[list[int], Field(max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)]
LogprobIds = Annotated[list[int], Field(max_length=MAX_LOGPROB_TOKEN_IDS, fail_fast=True)]


def _logit_bias(value: Any) -> Any:
    """Token ids as numbers: keys of JSON are text. `SamplingParams` checks the values."""
    if not isinstance(value, dict):
        return value  # refused by its type
    if len(value) > MAX_LOGIT_BIAS:
        raise _invalid("logit_bias", f"logit_bias has {len(value)} entries, at most {MAX_LOGIT_BIAS}")
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise _invalid("logit_bias", f"logit_bias holds {key!r:.60}, which is not a token id")
    biases = {int(key): bias for key, bias in value.items()}
    if len(biases) < len(value):
        raise _invalid("logit_bias", "logit_bias holds a token id twice")
    return biases


LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = Field(None, description="A last chunk with the totals of the request.")
    continuous_usage_stats: bool | None = Field(None, description="Totals so far on every chunk.")
    include_obfuscation: bool | None = Field(None, description="Ignored: no chunk is ever padded.")


class GenerationRequest(StructuredFields):
    """What both endpoints take."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    not_yet: ClassVar[dict[str, tuple[Any, ...]]] = NOT_YET

    model: str | None = Field(None, description="A served model name; absent: the one that is served.")
    stream: bool | None = Field(None, description="Answer in server-sent events.")
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, description="Most tokens to generate.")
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
    min_tokens: int | None = Field(None, description="Do not end before this many tokens.")
    skip_special_tokens: bool | None = Field(None, description="Leave control tokens out of the text. Default true.")
    spaces_between_special_tokens: bool | None = Field(None, description="As the tokenizer writes them. Default true.")
    truncate_prompt_tokens: int | None = Field(None, description="Keep the last tokens of the prompt; -1: what fits.")
    timeout: float | None = Field(None, description="Seconds after which the request ends, with reason `abort`.")
    prompt_logprobs: int | None = Field(None, description="Logprobs of the prompt, with this many likeliest tokens.")
    logprob_token_ids: LogprobIds | None = Field(None, description="Logprobs of these tokens, not the likeliest.")
    logprobs_mode: LogprobsMode | None = Field(None, description="`raw`: the model's; `processed`: as sampled from.")
    logits_processors: dict[str, dict[str, Any]] | None = Field(
        None, description="Name of a processor that the server has -> its arguments."
    )
    use_beam_search: bool | None = Field(None, description="Search the likeliest texts; `n` are returned.")
    beam_width: int | None = Field(None, description="Beams. Default best_of or n.")
    length_penalty: float | None = Field(None, description="Beams compare by logprob / length ** length_penalty.")
    early_stopping: bool | Literal["never"] | None = Field(None, description="When a beam search ends.")
    priority: int | None = Field(
        None, ge=-_INT32 - 1, le=_INT32, description="Smaller goes first, with --scheduling-policy priority."
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Cached prefixes are shared only with the same salt."
    )
    return_token_ids: bool | None = Field(None, description="Give the token ids of prompt and output.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Name tokens `token_id:123` in logprobs.")
    request_id: str | None = Field(None, max_length=256, description="Part of the response's id.")
    user: str | None = Field(None, description="Ignored.")
    safety_identifier: str | None = Field(None, description="Ignored.")
    prompt_cache_key: str | None = Field(None, description="Ignored: prefixes are cached by their content.")
    prompt_cache_retention: str | None = Field(None, description="Ignored.")
    metadata: dict[str, Any] | None = Field(None, description="Ignored: nothing is stored.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_built(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        for name in data:  # one fault is enough to be told of: there might be a million
            if name not in fields and name not in cls.not_yet:
                raise _invalid(name, f"unknown field {name!r:.80}")
        refused = first_refused(data, cls.not_yet)
        if refused is not None:
            context = {"param": refused, "shown": shown(data[refused])}
            raise PydanticCustomError("unsupported", "{param}={shown} is not supported", context)
        return {name: value for name, value in data.items() if name in fields}

    @model_validator(mode="after")
    def _some_need_a_stream_and_some_none(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise _invalid("stream_options", "stream_options is only allowed with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise _invalid("prompt_logprobs", "prompt_logprobs cannot be streamed")
        return self


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """A list of prompts, all texts or all token ids, from any of the four forms."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        what = "empty" if value in ([], None) else f"{type(value).__name__} {shown(value)}"
        raise _invalid("prompt", f"prompt must be text, token ids, or a list of these, not {what}")
    kinds = set(map(type, value))
    if not kinds & {str, list}:
        return [_token_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        raise _invalid("prompt", f"prompt holds {len(value)} prompts, at most {MAX_PROMPTS}")
    if kinds == {str}:
        return value
    for i, item in enumerate(value):
        if not isinstance(item, list):
            raise _invalid("prompt", f"prompt[{i}]={shown(item)} is not a list of token ids as others are")
    return [_token_ids(item, f"prompt[{i}]") for i, item in enumerate(value)]


def _token_ids(value: list[Any], where: str) -> list[int]:
    if not value:
        raise _invalid("prompt", f"{where} is empty: it needs at least one token")
    if set(map(type, value)) != {int}:
        i, item = next((i, item) for i, item in enumerate(value) if type(item) is not int)
        raise _invalid("prompt", f"{where}[{i}]={shown(item)} is not a token id")
    return value


_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _IDS_SCHEMA,
        {"type": "array", "items": _IDS_SCHEMA},
    ]
}


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    not_yet = NOT_YET_COMPLETION

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)] = Field(
        description="Text, token ids, or a list of either."
    )
    echo: bool | None = Field(None, description="Begin the text with the prompt; logprobs then cover it too.")
    logprobs: int | None = Field(None, description="Logprobs of each token and of this many most likely ones.")
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add BOS to a text. Default true.")


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    not_yet = NOT_YET_CHAT

    messages: list[Any] = Field(
        max_length=MAX_MESSAGES, description="The conversation: objects with `role` and `content`."
    )
    echo: bool | None = Field(None, description="Begin the answer with the last message, if it is the assistant's.")
    max_completion_tokens: int | None = Field(None, description="Most tokens to generate.")
    logprobs: bool | None = Field(None, description="Logprobs of each token.")
    top_logprobs: int | None = Field(None, description="And of this many most likely ones.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    add_generation_prompt: bool | None = Field(None, description="Open an assistant turn. Default true.")
    continue_final_message: bool | None = Field(None, description="Continue the last message.")

    @model_validator(mode="after")
    def _consistent(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise _invalid("top_logprobs", "top_logprobs is only allowed with logprobs=true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise _invalid("max_tokens", f"max_tokens={both[0]} contradicts max_completion_tokens={both[1]}")
        return self


def _invalid(param: str, message: str) -> PydanticCustomError:
    # The message goes in as a value: it may hold braces of the user's.
    return PydanticCustomError("invalid", "{message}", {"param": param, "message": message})


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `model` from its body; references are replaced by what they name."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inlined(definitions[node["$ref"].rpartition("/")[2]])
            # A discriminator speaks of definitions too, and says nothing that the alternatives do not.
            return {key: inlined(value) for key, value in node.items() if key != "discriminator"}
        return [inlined(item) for item in node] if isinstance(node, list) else node

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}}
