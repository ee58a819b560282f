"""The body of POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from server.errors import shown
from server.protocol.fields import invalid
from server.protocol.prompts import PROMPT_SCHEMA, Prompts, prompts
from server.refused import first_refused

MAX_INPUTS = 2048  # OpenAI's own
_INT32 = 2**31 - 1
# Fields of vLLM -> values that ask for nothing else than what is done.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
    "messages": (),
    "mm_processor_kwargs": ({},),
}


class EmbeddingRequest(BaseModel):
    """Body of POST /v1/embeddings."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input: Annotated[Prompts, PlainValidator(prompts("input", MAX_INPUTS)), WithJsonSchema(PROMPT_SCHEMA)] = Field(
        description="Text, token ids, or a list of either: a vector for each."
    )
    model: str | None = Field(None, description="A served model name; absent: the one that is served.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Numbers, or the base64 of little-endian float32. Default float."
    )
    dimensions: int | None = Field(None, description="Keep the first numbers of each vector. Default all.")
    pooling: Literal["last", "mean"] | None = Field(
        None, description="Of the last token, or the mean over all. Default: as the model says."
    )
    normalize: bool | None = Field(None, description="Scale to unit length, after the cut. Default true.")
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep the first tokens, and a control token at the end; -1: what fits."
    )
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add its own to a text. Default true.")
    priority: int | None = Field(
        None, ge=-_INT32 - 1, le=_INT32, description="Smaller goes first, with --scheduling-policy priority."
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Cached prefixes are shared only with the same salt."
    )
    request_id: str | None = Field(None, max_length=256, description="Part of the response's id.")
    user: str | None = Field(None, description="Ignored.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_built(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in data:  # one fault is enough to be told of: there might be a million
            if name not in cls.model_fields and name not in _NOT_YET:
                raise invalid(name, f"unknown field {name!r:.80}")
        refused = first_refused(data, _NOT_YET)
        if refused is not None:
            context = {"param": refused, "shown": shown(data[refused])}
            raise PydanticCustomError("unsupported", "{param}={shown} is not supported", context)
        return {name: value for name, value in data.items() if name in cls.model_fields}
