"""Tools for models whose chat template knows none: told in a system message, with how to call them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from server.tools.formats import ToolFormat

_INTRODUCTION = """You can call these tools:
{tools}
To call tools, answer with the calls and nothing else. One:
{one}
Two:
{two}
Otherwise answer in plain text."""
_EXAMPLE = {"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}


def described(messages: Sequence[Any], tools: Sequence[dict[str, Any]], form: ToolFormat) -> list[Any]:
    """Messages for such a template: the tools in the first system message, earlier calls as the model wrote them.

    Messages that are not well formed are left to the template's checks.

    Args:
      form: how calls are written.
    """
    told = [_with_calls(message, form) for message in messages]
    if not tools:
        return told
    text = _INTRODUCTION.format(
        tools="\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools),
        one=form.write([_EXAMPLE]),
        two=form.write([_EXAMPLE, _EXAMPLE]),
    )
    first = told[0] if told else None
    if isinstance(first, dict) and first.get("role") == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _made(function: Any) -> dict[str, Any]:
    return {"name": function["name"], "arguments": json.loads(function["arguments"])}


def _with_calls(message: Any, form: ToolFormat) -> Any:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not calls or not isinstance(message.get("content"), str | None):
        return message
    try:
        written = form.write([_made(call["function"]) for call in calls])
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return message
    content = "\n".join(filter(None, [message.get("content"), written]))
    return {**message, "content": content}
