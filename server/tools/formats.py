"""The formats in which models write calls, by vLLM's names, and which one a chat template speaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from jaxpaged.errors import ConfigError
from server.parsing.deltas import Parser
from server.tools import written
from server.tools.deepseek_v3 import CALLS, DeepSeekV3Parser
from server.tools.hermes import OPEN, HermesParser
from server.tools.mistral import CALLS as MISTRAL_CALLS
from server.tools.mistral import MistralParser
from server.tools.plain_json import Llama3JsonParser, PlainJsonParser
from server.tools.pythonic import START, PythonicParser


@dataclass(frozen=True)
class ToolFormat:
    """A way to write calls.

    Attributes:
      make: a parser of one answer, from the tools' names and those markers that are control tokens of the model.
      write: calls as the model writes them.
      markers: texts that some models have as control tokens: these must reach the parser.
      sign: a text that only chat templates of this format hold; "": none tells.
    """

    make: Callable[[Set[str], Sequence[str]], Parser]
    write: Callable[[written.Calls], str]
    markers: tuple[str, ...] = ()
    sign: str = ""


_HERMES = ToolFormat(lambda _, hidden: HermesParser(hidden), written.hermes_tags, HermesParser.MARKERS, OPEN)
_LLAMA3 = ToolFormat(
    Llama3JsonParser, written.llama3_json, Llama3JsonParser.MARKERS, '"parameters": dictionary of argument name'
)
_PYTHONIC = ToolFormat(PythonicParser, written.pythonic, PythonicParser.MARKERS, START)
_MISTRAL = ToolFormat(
    lambda _, hidden: MistralParser(hidden), written.mistral_array, MistralParser.MARKERS, MISTRAL_CALLS
)
_DEEPSEEK = ToolFormat(
    lambda _, hidden: DeepSeekV3Parser(hidden), written.deepseek_v3_fences, DeepSeekV3Parser.MARKERS, CALLS
)
PLAIN_JSON = ToolFormat(PlainJsonParser, written.plain_json)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": _HERMES,
    "llama3_json": _LLAMA3,
    "llama4_json": _LLAMA3,
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "mistral": _MISTRAL,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "json": PLAIN_JSON,
}
_FOREIGN = "<function="  # a template with it asks for XML between the tags of Hermes


def tool_format(name: str | None, chat_template: str | None) -> ToolFormat:
    """The format of this name; None: the one that the template speaks, else plain JSON.

    Raises:
      ConfigError: there is none of this name.
    """
    if name is not None:
        if name not in TOOL_FORMATS:
            raise ConfigError(f"tool_call_parser={name!r} must be one of {', '.join(TOOL_FORMATS)}")
        return TOOL_FORMATS[name]
    template = chat_template or ""
    found = [form for form in TOOL_FORMATS.values() if form.sign and form.sign in template]
    return found[0] if found and _FOREIGN not in template else PLAIN_JSON
