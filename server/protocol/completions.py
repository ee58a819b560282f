"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PlainValidator, WithJsonSchema

from server.protocol.generation import GenerationRequest
from server.protocol.prompts import PROMPT_SCHEMA, Prompts, prompts
from server.protocol.refused import NOT_YET_COMPLETION

MAX_PROMPTS = 1024


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    not_yet = NOT_YET_COMPLETION

    prompt: Annotated[Prompts, PlainValidator(prompts("prompt", MAX_PROMPTS)), WithJsonSchema(PROMPT_SCHEMA)] = Field(
        description="Text, token ids, or a list of either. Taken as it is: text that spells a control token becomes it."
    )
    echo: bool | None = Field(None, description="Begin the text with the prompt; logprobs then cover it too.")
    logprobs: int | None = Field(None, description="Logprobs of each token and of this many most likely ones.")
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add BOS to a text. Default true.")
