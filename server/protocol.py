"""The request bodies of the OpenAI API, with vLLM's extra fields.

Numbers are strict: `true` and `"1"` are none, NaN and infinity are refused. A field that we do not know is refused;
one that we know but have not built is accepted only with a value that asks for nothing. `null` means absent.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

MAX_PROMPTS = 1024

# Field -> values that ask for nothing. None is always one.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "use_beam_search": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True, False),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "return_token_ids": (False,),
    "priority": (0,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "service_tier": ("auto", "default"),
}
NOT_YET_COMPLETION: dict[str, tuple[Any, ...]] = {
    **NOT_YET,
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
}
NOT_YET_CHAT: dict[str, tuple[Any, ...]] = {
    **NOT_YET,
    "echo": (False,),
    "add_special_tokens": (False,),  # the template writes them
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": (False,),
    "chat_template": (),  # a template is a program: only the model's own is run
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = Field(None, description="A last chunk with the totals of the request.")
    continuous_usage_stats: bool | None = Field(None, description="Totals so far on every chunk.")
    include_obfuscation: bool | None = Field(None, description="Ignored: no chunk is ever padded.")


class GenerationRequest(BaseModel):
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
    stop: str | list[str] | None = Field(None, description="Strings that end the text.")
    stop_token_ids: list[int] | None = Field(None, description="Token ids that end the text.")
    include_stop_str_in_output: bool | None = Field(None, description="Leave the stop string in the text.")
    ignore_eos: bool | None = Field(None, description="Go on after the model's end-of-sequence tokens.")
    min_tokens: int | None = Field(None, description="Do not end before this many tokens.")
    skip_special_tokens: bool | None = Field(None, description="Leave control tokens out of the text. Default true.")
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
        for name in data.keys() & cls.not_yet.keys():
            if not _asks_for_nothing(data[name], cls.not_yet[name]):
                shown = repr(data[name])[:60]
                raise PydanticCustomError(
                    "unsupported", "{param}={shown} is not supported", {"param": name, "shown": shown}
                )
        return {name: value for name, value in data.items() if name not in cls.not_yet}

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise _invalid("stream_options", "stream_options is only allowed with stream=true")
        return self


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """A list of prompts, all texts or all token ids, from any of the four forms."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        what = "empty" if value in ([], None) else f"{type(value).__name__} {value!r}"[:60]
        raise _invalid("prompt", f"prompt must be text, token ids, or a list of these, not {what}")
    if not any(isinstance(item, (str, list)) for item in value):
        return [_token_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        raise _invalid("prompt", f"prompt holds {len(value)} prompts, at most {MAX_PROMPTS}")
    if all(isinstance(item, str) for item in value):
        return value
    for i, item in enumerate(value):
        if not isinstance(item, list):
            raise _invalid("prompt", f"prompt[{i}]={item!r:.40} is not a list of token ids as others are")
    return [_token_ids(item, f"prompt[{i}]") for i, item in enumerate(value)]


def _token_ids(value: list[Any], where: str) -> list[int]:
    for i, item in enumerate(value):
        if type(item) is not int:
            raise _invalid("prompt", f"{where}[{i}]={item!r:.40} is not a token id")
    if not value:
        raise _invalid("prompt", f"{where} is empty: it needs at least one token")
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

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)] = Field(
        description="Text, token ids, or a list of either."
    )
    logprobs: int | None = Field(None, description="Logprobs of each token and of this many most likely ones.")
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add BOS to a text. Default true.")


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    not_yet = NOT_YET_CHAT

    messages: list[Any] = Field(description="The conversation: objects with `role` and `content`.")
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


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equality that tells true from 1."""
    return value is None or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)


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
            return {key: inlined(value) for key, value in node.items()}
        return [inlined(item) for item in node] if isinstance(node, list) else node

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}}
