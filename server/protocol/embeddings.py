"""The body of POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from server.protocol.body import EngineBody
from server.protocol.prompts import PROMPT_SCHEMA, Prompts, prompts
from server.protocol.refused import NOT_YET_EMBEDDING

MAX_INPUTS = 2048  # OpenAI's own


class EmbeddingRequest(EngineBody):
    """Body of POST /v1/embeddings."""

    not_yet = NOT_YET_EMBEDDING

    input: Annotated[Prompts, PlainValidator(prompts("input", MAX_INPUTS)), WithJsonSchema(PROMPT_SCHEMA)] = Field(
        description="Text, token ids, or a list of either: a vector for each."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Numbers, or the base64 of little-endian float32. Default float."
    )
    dimensions: int | None = Field(None, description="Keep the first numbers of each vector. Default all.")
    pooling: Literal["last", "mean"] | None = Field(
        None, description="Of the last token, or the mean over all. Default: as the model says."
    )
    normalize: bool | None = Field(None, description="Scale to unit length, after the cut. Default true.")
    use_activation: bool | None = Field(None, description="vLLM's newer word for `normalize`.")
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep the first tokens, and a control token at the end; -1: what fits."
    )
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add its own to a text. Default true.")
