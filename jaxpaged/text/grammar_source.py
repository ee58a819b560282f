"""Structured outputs in llguidance's notation, and what it says against them in ours."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher

from jaxpaged.core.sampling_params import StructuredOutputs
from jaxpaged.errors import InvalidRequestError
from jaxpaged.text import gbnf

MAX_CHARS = 256 << 10  # of a schema, grammar or regular expression

_OPTIONS = '\n%llguidance {"no_forcing": true}\n'  # the model cuts the text into tokens, not the grammar
# Enough for compact and for indented JSON, and too little to write blanks for ever.
JSON_BLANKS = {"whitespace_pattern": r" {1,4}|\r?\n[ \t]{0,40}"}
_MAX_REASON = 300  # characters


def llguidance_source(wanted: StructuredOutputs) -> str:
    """The grammar in llguidance's own form.

    Raises:
      InvalidRequestError: too large, or no valid JSON, Unicode or EBNF.
    """
    try:
        source = _SOURCES[wanted.kind](getattr(wanted, wanted.kind))
        if wanted.after is not None:
            source = _after(*wanted.after, source)
        source.encode()
    except RecursionError as error:
        raise invalid(f"{wanted.kind}: too deep") from error
    except (ValueError, TypeError) as error:
        raise invalid(f"{wanted.kind}: {reason(str(error))}") from error
    return source


def _json_source(schema: str | dict[str, Any]) -> str:
    if isinstance(schema, str):
        _check_length(schema)
        schema = json.loads(schema, parse_constant=_no_constant)
    if schema is False:
        raise ValueError("it matches no text")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is an object, not {type(schema).__name__}")
    options = schema.get("x-guidance", {})
    if isinstance(options, dict) and "whitespace_flexible" not in options:
        schema = {**schema, "x-guidance": {**JSON_BLANKS, **options}}
    text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    _check_length(text)
    return _lark("start: %json " + text)


def _regex_source(pattern: str) -> str:
    _check_length(pattern)
    (grammar,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return _lark(grammar["lark_grammar"])


def _choice_source(choices: list[str]) -> str:
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("takes a list of at least one text")
    _check_num_chars(sum(map(len, choices)))  # before they are escaped, which may take seconds
    text = " | ".join(map(gbnf.literal, choices))
    _check_length(text)
    return _lark(f"start: CHOICE\nCHOICE: {text}")


def _grammar_source(text: str) -> str:
    """Lark's notation, unless a rule is written `name ::= ...`, as in EBNF (GBNF)."""
    _check_length(text)
    return _lark(gbnf.gbnf_to_lark(text) if gbnf.RULE.search(text) else text)


_SOURCES = {
    "json": _json_source,
    "json_object": lambda _: _json_source({"type": "object"}),
    "regex": _regex_source,
    "choice": _choice_source,
    "grammar": _grammar_source,
}


def _after(begin: str, end: str, source: str) -> str:
    """A grammar with a text before it, which may hold anything but its end mark."""
    quoted = re.escape(end).replace("/", r"\/")
    start = "thought blanks @answer" if not begin else "(begin thought blanks)? @answer"
    lines = [f"start: {start}", rf"thought[lazy]: /(.|\n)*{quoted}/", r"blanks: /\n{0,2}/"]
    if begin:
        lines.append(f"begin: {gbnf.literal(begin)}")
    (answer,) = json.loads(source)["grammars"]
    head = {"lark_grammar": "\n".join(lines) + _OPTIONS}
    return json.dumps({"grammars": [head, {"name": "answer", **answer}]}, ensure_ascii=False)


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text + _OPTIONS}]}, ensure_ascii=False)


def _check_length(text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"takes a text, not {type(text).__name__}")
    _check_num_chars(len(text))


def _check_num_chars(number: int) -> None:
    if number > MAX_CHARS:
        raise ValueError(f"{number} characters, at most {MAX_CHARS}")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def invalid(message: str) -> InvalidRequestError:
    """The error of a request whose structured outputs are wrong."""
    return InvalidRequestError(f"structured_outputs.{message}", param="structured_outputs")


def reason(message: str) -> str:
    """llguidance's message on one line, without the grammar's text around it, places in our wrapping, and traces."""
    if message.startswith("panic:"):
        return "llguidance cannot handle it"
    message = message.split("<backtrace>")[0].replace("<non-verbose/>", "")
    message = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", message)
    lines = [line.strip() for line in message.splitlines() if not re.match(r"\s*(\d+ \||\^|$)", line)]
    return " ".join(lines)[:_MAX_REASON]
