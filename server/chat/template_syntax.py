"""Whether a text is a chat template, told without a model."""

from __future__ import annotations

from typing import ClassVar

import jinja2.ext
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def syntax_fault(text: str) -> str | None:
    """What is wrong with a template where transformers renders it; None: nothing. It is compiled and not run."""
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, jinja2.ext.loopcontrols])
    try:
        environment.compile(text)
    except jinja2.TemplateSyntaxError as e:
        return f"line {e.lineno}: {e.message}"
    except RecursionError:
        return "it is too deep"
    return None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model writes, for training; what it holds is rendered as if it were not there."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
