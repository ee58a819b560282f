"""What a body says about the form of the text, in OpenAI's words and in both of vLLM's."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxpaged.core.sampling_params import StructuredOutputs
from jaxpaged.errors import InvalidRequestError
from server.protocol.body import Strict
from server.protocol.fields import unsupported
from server.protocol.refused import NOT_YET_STRUCTURED, first_refused

_PATTERN = "whitespace_pattern"
Choices = Annotated[list[str], Field(max_length=4096, fail_fast=True)]


class JsonSchema(Strict):
    """The `json_schema` of a `response_format`."""

    name: str = Field(max_length=256, description="Ignored.")
    description: str | None = Field(None, description="Ignored.")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="What the text must match. Default: any object."
    )
    strict: bool | None = Field(None, description="Ignored: the schema is always followed.")


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputsBody(Strict):
    """vLLM's `structured_outputs`: exactly one of these."""

    json_: str | dict[str, Any] | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = Field(None, description="A regular expression.")
    choice: Choices | None = Field(None, description="One of these texts.")
    grammar: str | None = Field(None, description="A context-free grammar.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    whitespace_pattern: str | None = Field(
        None,
        max_length=1024,
        description="With a JSON schema: what may stand between its parts, a regular expression.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_built(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        refused = first_refused(data, NOT_YET_STRUCTURED)
        if refused is not None:
            raise unsupported(refused, data[refused], "structured_outputs.")
        return {name: value for name, value in data.items() if name not in NOT_YET_STRUCTURED}


class StructuredFields(Strict):
    """The fields of a body that say it."""

    response_format: ResponseFormat | None = Field(None, description="Text, any JSON object, or a JSON schema.")
    structured_outputs: StructuredOutputsBody | None = Field(
        None, description="The form of the text, in vLLM's words: one of json, regex, choice, grammar, json_object."
    )
    guided_json: str | dict[str, Any] | None = Field(None, description="As structured_outputs.json.")
    guided_regex: str | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: Choices | None = Field(None, description="As structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="As structured_outputs.grammar.")
    guided_json_object: bool | None = Field(None, description="As structured_outputs.json_object.")
    guided_whitespace_pattern: str | None = Field(
        None, max_length=1024, description="As structured_outputs.whitespace_pattern, for any JSON that is asked for."
    )
    guided_decoding_backend: str | None = Field(None, max_length=256, description="Ignored: there is one.")


def structured_outputs(body: StructuredFields) -> StructuredOutputs | None:
    """What form the text must have; None if it is free.

    Raises:
      InvalidRequestError: two fields say it, or one says it in no way or in two.
    """
    asked = _asked(body)
    if len(asked) > 1:
        first, *_, last = asked
        raise InvalidRequestError(f"{last} contradicts {first}: the text can have one form", param=last)
    if not asked:
        return None
    ((field, form),) = asked.items()
    own = form.pop(_PATTERN, None)
    pattern = body.guided_whitespace_pattern if own is None else own
    return StructuredOutputs(**(form if pattern is None else _with_blanks(field, form, pattern)))


def _with_blanks(field: str, form: dict[str, Any], pattern: str) -> dict[str, Any]:
    """A form with its blanks as the request wants them: llguidance reads that in the schema."""
    if not form.keys() <= {"json", "json_object"} or len(form) != 1:
        raise InvalidRequestError(f"{field} has no JSON for which a pattern of white space could count", param=field)
    schema = form.get("json", {"type": "object"})
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return form  # refused by whoever compiles it
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return form
    options = schema.get("x-guidance")
    return {"json": {**schema, "x-guidance": {**(options if isinstance(options, dict) else {}), _PATTERN: pattern}}}


def structured_field(body: StructuredFields) -> str | None:
    """The name of the field that says what form the text must have."""
    return next(reversed(_asked(body)), None)


def _asked(body: StructuredFields) -> dict[str, dict[str, Any]]:
    """Arguments of StructuredOutputs, by the field that gives them."""
    asked: dict[str, dict[str, Any]] = {}
    match body.response_format:
        case JsonObjectFormat():
            asked["response_format"] = {"json_object": True}
        case JsonSchemaFormat(json_schema=wrapper):
            schema = wrapper.schema_
            asked["response_format"] = {"json_object": True} if schema is None else {"json": schema}
    if body.structured_outputs is not None:
        asked["structured_outputs"] = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    for kind in ("json", "regex", "choice", "grammar", "json_object"):
        value = getattr(body, f"guided_{kind}")
        if value is not None and value is not False:
            asked[f"guided_{kind}"] = {kind: value}
    return asked
