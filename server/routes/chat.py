"""POST /v1/chat/completions: a conversation through the model's chat template."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.async_llm import PreparedRequest
from jaxpaged.engine.output import CompletionOutput
from jaxpaged.text.chat import check_template_options
from server.body import read_body
from server.convert import LogprobFormat, Usage, chat_params, last_is_hidden, total_usage
from server.protocol import ChatCompletionRequest, body_schema
from server.serving import Serving, serving
from server.stream import DONE, event, event_stream, finals, merged, unless_gone

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
async def create_chat_completion(http: Request) -> Response:
    """Answers a conversation."""
    body = await read_body(http, ChatCompletionRequest)
    state = serving(http)
    state.check(body.model)
    params = chat_params(body, state.llm.config.max_logprobs)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = state.head(http, body, "chatcmpl", kind)
    prepared = await unless_gone(http, _prepare(state, body, params, head["id"]))
    form = state.logprob_format(body)
    if body.stream:
        return await event_stream(http, _events(state, body, params, prepared, head, form))
    outputs = await unless_gone(http, finals([state.llm.stream(prepared)]))
    completion = outputs[0].outputs[0]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "logprobs": _logprobs(completion, params, form),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    answer = {**head, "choices": [choice], "usage": total_usage(outputs).to_json()}
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _prepare(
    state: Serving, body: ChatCompletionRequest, params: SamplingParams, request_id: str
) -> PreparedRequest:
    options = body.chat_template_kwargs or {}
    check_template_options(options)
    ids = await state.llm.render_chat(
        body.messages,
        # An open last message and a new turn exclude each other: wanting the one means not wanting the other.
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        **options,
    )
    return await state.llm.prepare(ids, params, request_id)


async def _events(
    state: Serving,
    body: ChatCompletionRequest,
    params: SamplingParams,
    prepared: PreparedRequest,
    head: dict[str, Any],
    form: LogprobFormat,
) -> AsyncGenerator[bytes, None]:
    """A chunk with the role, chunks with content, one with the finish reason, one with the usage if wanted."""
    options = body.stream_options
    with_usage = bool(options and options.include_usage)
    continuous = bool(options and options.continuous_usage_stats)
    usage = Usage()

    def chunk(delta: dict[str, Any], completion: CompletionOutput | None = None, *, last: bool = False) -> bytes:
        choice: dict[str, Any] = {
            "index": 0,
            "delta": delta,
            "logprobs": None if completion is None or last else _logprobs(completion, params, form),
            "finish_reason": completion.finish_reason if completion is not None and last else None,
        }
        if completion is not None and last:
            choice["stop_reason"] = completion.stop_reason
        extra = {"usage": usage.to_json() if continuous else None} if with_usage or continuous else {}
        return event({**head, "choices": [choice], **extra})

    opened = False
    async with aclosing(merged([state.llm.stream(prepared)])) as outputs:
        async for _, output in outputs:
            completion = output.outputs[0]
            chunks = b""
            if not opened:
                opened = True
                chunks = chunk({"role": "assistant", "content": ""})
            usage.add(0, output)
            if completion.text or completion.logprobs:
                chunks += chunk({"content": completion.text}, completion)
            if output.finished:
                chunks += chunk({}, completion, last=True)
            if chunks:
                yield chunks
    if with_usage:
        yield event({**head, "choices": [], "usage": usage.to_json()})
    yield DONE


def _logprobs(completion: CompletionOutput, params: SamplingParams, form: LogprobFormat) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    return form.chat(completion.logprobs, last_is_hidden=last_is_hidden(completion, params))
