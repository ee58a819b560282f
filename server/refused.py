"""Fields of the API that are known but not built: accepted only with a value that asks for nothing."""

from __future__ import annotations

from typing import Any

# Field -> values that ask for nothing. None is always one.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "service_tier": ("auto", "default"),
}
NOT_YET_COMPLETION: dict[str, tuple[Any, ...]] = {
    **NOT_YET,
    "suffix": ("",),
}
NOT_YET_CHAT: dict[str, tuple[Any, ...]] = {
    **NOT_YET,
    "add_special_tokens": (False,),  # the template writes them
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": (False,),
    "chat_template": (),  # a template is a program: only the model's own is run
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}


def first_refused(data: dict[str, Any], not_yet: dict[str, tuple[Any, ...]]) -> str | None:
    """The first field of a body that asks for what is not built."""
    return next((n for n in data if n in not_yet and not _asks_for_nothing(data[n], not_yet[n])), None)


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equality that tells true from 1."""
    return value is None or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)
