"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from server.errors import shown
from server.protocol.fields import invalid
from server.protocol.generation import GenerationRequest
from server.refused import NOT_YET_COMPLETION

MAX_PROMPTS = 1024


def prompts(value: Any) -> list[str] | list[list[int]]:
    """A list of prompts, all texts or all token ids, from any of the four forms."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        what = "empty" if value in ([], None) else f"{type(value).__name__} {shown(value)}"
        raise invalid("prompt", f"prompt must be text, token ids, or a list of these, not {what}")
    kinds = set(map(type, value))
    if not kinds & {str, list}:
        return [_token_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt holds {len(value)} prompts, at most {MAX_PROMPTS}")
    if kinds == {str}:
        return value
    for i, item in enumerate(value):
        if not isinstance(item, list):
            raise invalid("prompt", f"prompt[{i}]={shown(item)} is not a list of token ids as others are")
    return [_token_ids(item, f"prompt[{i}]") for i, item in enumerate(value)]


def _token_ids(value: list[Any], where: str) -> list[int]:
    if not value:
        raise invalid("prompt", f"{where} is empty: it needs at least one token")
    if set(map(type, value)) != {int}:
        i, item = next((i, item) for i, item in enumerate(value) if type(item) is not int)
        raise invalid("prompt", f"{where}[{i}]={shown(item)} is not a token id")
    return value


_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}}
PROMPT_SCHEMA = {
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

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(prompts), WithJsonSchema(PROMPT_SCHEMA)] = Field(
        description="Text, token ids, or a list of either."
    )
    echo: bool | None = Field(None, description="Begin the text with the prompt; logprobs then cover it too.")
    logprobs: int | None = Field(None, description="Logprobs of each token and of this many most likely ones.")
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add BOS to a text. Default true.")
