"""The grammar of an answer that must be calls: a JSON array of names and arguments that match the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxpaged.core.sampling_params import StructuredOutputs
from jaxpaged.text.grammar_source import JSON_BLANKS
from server.protocol.tools import Function

MAX_CALLS = 64  # in one answer


def forced_calls(functions: Sequence[Function], *, max_calls: int = MAX_CALLS) -> StructuredOutputs:
    """One call or more of these functions, as `PlainJsonParser` reads them."""
    names = [f"call_{i}" for i in range(len(functions))]
    more = f' (", " call){{0,{max_calls - 1}}}' if max_calls > 1 else ""
    lines = [f'start: "[" call{more} "]"', f"call: {' | '.join(names)}"]
    for i, function in enumerate(functions):
        before = json.dumps(f'{{"name": {json.dumps(function.name)}, "arguments": ')
        lines += [f'call_{i}: {before} arguments_{i} "}}"', f"arguments_{i}: %json {_schema_text(function)}"]
    return StructuredOutputs(grammar="\n".join(lines))


def _schema_text(function: Function) -> str:
    schema: dict[str, Any] = function.parameters or {"properties": {}, "additionalProperties": False}
    text = json.dumps({"x-guidance": JSON_BLANKS, **schema, "type": "object"}, ensure_ascii=False)
    return text.replace("::=", "\\u003a:=")  # only texts hold it; as it is it would be taken for a rule of EBNF
