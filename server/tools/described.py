"""Tools for models whose chat template knows none: told in a system message, and in plain JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_INTRODUCTION = """You can call these tools:
{tools}
To call tools, answer with a JSON array and nothing else, an object a call: [{{"name": "...", "arguments": {{...}}}}]
Otherwise answer in plain text."""


def described(messages: Sequence[Any], tools: Sequence[dict[str, Any]]) -> list[Any]:
    """Messages for such a template: the tools in the first system message, earlier calls as the model wrote them.

    Messages that are not well formed are left to the template's checks.
    """
    told = [_with_calls(message) for message in messages]
    if not tools:
        return told
    text = _INTRODUCTION.format(tools="\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools))
    first = told[0] if told else None
    if isinstance(first, dict) and first.get("role") == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _with_calls(message: Any) -> Any:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not calls or not isinstance(message.get("content"), str | None):
        return message
    try:
        written = [
            {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])} for call in calls
        ]
    except (LookupError, TypeError, ValueError, RecursionError):
        return message
    content = "\n".join(filter(None, [message.get("content"), json.dumps(written, ensure_ascii=False)]))
    return {**message, "content": content}
