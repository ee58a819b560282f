"""Calls as the models of each format write them: for those whose chat template does not say it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from server.tools import deepseek_v3, hermes, mistral

Calls = Sequence[Mapping[str, Any]]
"""Objects with "name" and "arguments"."""


def plain_json(calls: Calls) -> str:
    """An array of objects."""
    return _json(list(calls))


def hermes_tags(calls: Calls) -> str:
    """An object between tags, each."""
    return "\n".join(f"{hermes.OPEN}\n{_json(call)}\n{hermes.CLOSE}" for call in calls)


def llama3_json(calls: Calls) -> str:
    """Objects with "parameters"."""
    return "; ".join(_json({"name": call["name"], "parameters": call["arguments"]}) for call in calls)


def pythonic(calls: Calls) -> str:
    """A list of Python's calls."""
    return f"[{', '.join(map(_python_call, calls))}]"


def mistral_array(calls: Calls) -> str:
    """An array behind a marker."""
    return mistral.CALLS + _json(list(calls))


def deepseek_v3_fences(calls: Calls) -> str:
    """A fenced block between markers, each."""
    d = deepseek_v3
    each = (f"{d.CALL}function{d.SEPARATOR}{c['name']}\n{d.FENCE}\n{_json(c['arguments'])}\n```{d.END}" for c in calls)
    return d.CALLS + "\n".join(each) + d.CALLS_END


def _python_call(call: Mapping[str, Any]) -> str:
    return f"{call['name']}({', '.join(f'{name}={value!r}' for name, value in call['arguments'].items())})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
