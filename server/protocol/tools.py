"""Tools in the body of a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from server.errors import shown
from server.protocol.body import Strict
from server.protocol.fields import invalid

MAX_TOOLS = 512
MAX_DESCRIPTION = 1 << 16  # characters


def _object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type", "object")
    if kind != "object":
        raise invalid("tools", f"tools: parameters are of type {shown(kind)}; arguments are an object")
    return schema


class Function(Strict):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="Letters, digits, _ and -; at most 64.")
    description: str | None = Field(None, max_length=MAX_DESCRIPTION, description="What it does, for the model.")
    parameters: Annotated[dict[str, Any], AfterValidator(_object_schema)] | None = Field(
        None, description="JSON schema of its arguments, an object. Default: it takes none."
    )
    strict: bool | None = Field(None, description="Ignored: forced calls always follow the schema, others never.")


class Tool(Strict):
    """A tool."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = self.function.model_dump(exclude_none=True)
        return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, **function}}


class NamedChoice(NamedTuple):
    """The one tool that must be called."""

    name: str


class AllowedTools(NamedTuple):
    """Some of the tools: as if there were no others.

    Attributes:
      mode: "auto" or "required".
    """

    mode: str
    names: tuple[str, ...]


def _choice(value: Any) -> str | NamedChoice | AllowedTools | None:
    if value is None or value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed(value)
    function = value.get("function") if isinstance(value, dict) and value.keys() == {"type", "function"} else None
    if isinstance(function, dict) and value["type"] == "function" and isinstance(function.get("name"), str):
        return NamedChoice(function["name"])
    form = '{"type": "function", "function": {"name": ...}}'
    raise invalid("tool_choice", f'tool_choice={shown(value)} is none of "none", "auto", "required", and not {form}')


def _allowed(value: dict[str, Any]) -> AllowedTools:
    allowed = value.get("allowed_tools")
    if isinstance(allowed, dict) and value.keys() == {"type", "allowed_tools"} and allowed.keys() == {"mode", "tools"}:
        mode, tools = allowed["mode"], allowed["tools"]
        if mode in ("auto", "required") and isinstance(tools, list) and 0 < len(tools) <= MAX_TOOLS:
            names = tuple(choice.name for choice in map(_choice, tools) if isinstance(choice, NamedChoice))
            if len(names) == len(tools):
                return AllowedTools(mode, names)
    form = '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
    raise invalid("tool_choice", f"tool_choice={shown(value)} is not {form}, with one tool or more")


_NAMED_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["function"]},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
_ALLOWED_SCHEMA = {
    "type": "object",
    "properties": {
        "mode": {"type": "string", "enum": ["auto", "required"]},
        "tools": {"type": "array", "minItems": 1, "items": _NAMED_SCHEMA},
    },
    "required": ["mode", "tools"],
    "additionalProperties": False,
}
_CHOICE_SCHEMA = {
    "anyOf": [
        {"type": "string", "enum": ["none", "auto", "required"]},
        _NAMED_SCHEMA,
        {
            "type": "object",
            "properties": {"type": {"type": "string", "enum": ["allowed_tools"]}, "allowed_tools": _ALLOWED_SCHEMA},
            "required": ["type", "allowed_tools"],
            "additionalProperties": False,
        },
        {"type": "null"},
    ]
}
ToolChoice = Annotated[str | NamedChoice | AllowedTools | None, PlainValidator(_choice), WithJsonSchema(_CHOICE_SCHEMA)]


def distinct_names(tools: Sequence[Tool]) -> list[str]:
    """The names of tools. Raises what `invalid` makes if two have the same."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise invalid("tools", f"tools hold the function {twice!r} twice")
    return names


class ToolFields(Strict):
    """The fields of a body that speak of tools."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the model may call."
    )
    tool_choice: ToolChoice = Field(
        None,
        description="`none`; `auto`, the default: as the model likes; `required`: at least one; or one tool, or some.",
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call. Default true.")

    @property
    def choice(self) -> str | NamedChoice:
        """The choice, "none" if there are no tools; of some, its mode."""
        choice = self.tool_choice
        if not self.tools:
            return "none"
        if isinstance(choice, AllowedTools):
            return choice.mode
        return "auto" if choice is None else choice

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        tools, choice = self.tools or [], self.tool_choice
        return [t for t in tools if t.function.name in choice.names] if isinstance(choice, AllowedTools) else tools

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that may be called."""
        choice, tools = self.choice, self.offered_tools
        if isinstance(choice, NamedChoice):
            return [tool for tool in tools if tool.function.name == choice.name]
        return [] if choice == "none" else tools

    @property
    def forces_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice not in ("none", "auto")

    def check_tools(self) -> None:
        """Raises what `invalid` makes if the fields contradict each other."""
        names = distinct_names(self.tools or ())
        choice = self.tool_choice
        if not names and choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice demands a call, but there are no tools")
        chosen = choice.names if isinstance(choice, AllowedTools) else ()
        for name in (choice.name,) if isinstance(choice, NamedChoice) else chosen:
            if name not in names:
                raise invalid("tool_choice", f"tool_choice names {name!r:.80}, which is none of the tools")
