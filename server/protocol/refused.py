"""Fields of the API that are known but not built: accepted only with a value that asks for nothing."""

from __future__ import annotations

from typing import Any

# Field -> values that ask for nothing. None is always one.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "ec_transfer_params": (),
    "kv_transfer_params": (),
    "repetition_detection": (),
    "mm_payload": ("tensors", "none"),  # only what vLLM's render endpoints return
    "return_mm_kwargs": (True, False),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "thinking_token_budget": (-1,),
    "truncation_side": ("left",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
NOT_YET_COMPLETION: dict[str, tuple[Any, ...]] = {
    **NOT_YET,
    "prompt_embeds": (),
    "suffix": ("",),
}
NOT_YET_CHAT: dict[str, tuple[Any, ...]] = {
    **NOT_YET,
    "add_special_tokens": (False,),  # the template writes them
    "functions": ([],),  # OpenAI's older words for tools
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "prompt_cache_options": (),
    "prediction": (),
    "web_search_options": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "return_prompt_text": (False,),
}
NOT_YET_EMBEDDING: dict[str, tuple[Any, ...]] = {
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "padding": ("do_not_pad",),
    "truncation_side": ("right",),
}
NOT_YET_STRUCTURED: dict[str, tuple[Any, ...]] = {  # within structured_outputs
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (False,),
    "structural_tag": (),
}
NOT_YET_TOKENIZE: dict[str, tuple[Any, ...]] = {"media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}

INSTEAD = {"functions": "tools", "function_call": "tool_choice"}  # what to send for what is refused


def first_refused(data: dict[str, Any], not_yet: dict[str, tuple[Any, ...]]) -> str | None:
    """The first field of a body that asks for what is not built."""
    return next((n for n in data if n in not_yet and not _asks_for_nothing(data[n], not_yet[n])), None)


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equality that tells true from 1."""
    return value is None or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)
