"""POST /v1/chat/completions: a conversation through the model's chat template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.async_llm import PreparedRequest
from jaxpaged.engine.output import RequestOutput
from server.body import read_body
from server.chat_choices import ChatChoices
from server.chat_plan import ChatPlan
from server.convert import Usage, named_as_sent, sampling_params, total_usage
from server.parsed_choices import ParsedChoices
from server.protocol.chat import ChatCompletionRequest
from server.protocol.fields import body_schema
from server.serving import Serving, serving
from server.stream import DONE, event, event_stream, finals, unless_gone

router = APIRouter()
_LONG = 1 << 14  # characters


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
async def create_chat_completion(http: Request) -> Response:
    """Answers a conversation."""
    body = await read_body(http, ChatCompletionRequest)
    state = serving(http)
    state.check(body.model)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = state.head(http, body, "chatcmpl", kind)
    plan = ChatPlan(body, state.chat_formats, state.config, state.llm.tokenizer)
    with named_as_sent(body):
        params = sampling_params(body, state.config.override_generation_config)
        prepared = await unless_gone(http, _prepare(state, body, plan, params, head["id"]))
    choices = _choices(state, body, plan)
    stream = state.llm.stream(prepared)
    if body.stream:
        return await event_stream(http, _events(body, stream, choices, head))
    (output,) = await unless_gone(http, finals([stream]))
    answered = await _whole(choices, output)
    usage = total_usage([output])
    usage.reasoning_tokens = choices.reasoning_tokens
    answer = {**head, "choices": answered, "usage": usage.to_json(), **choices.of_prompt(output)}
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _prepare(
    state: Serving, body: ChatCompletionRequest, plan: ChatPlan, params: SamplingParams, request_id: str
) -> PreparedRequest:
    ids = await state.llm.render_chat(plan.messages, **plan.template_options)
    return await state.prepare(body, ids, plan.sampling_params(params, ids), request_id)


def _choices(state: Serving, body: ChatCompletionRequest, plan: ChatPlan) -> ChatChoices:
    form = state.logprob_format(body)
    return ParsedChoices(body, form, plan, state.llm.tokenizer) if plan.parses else ChatChoices(body, form)


async def _whole(choices: ChatChoices, output: RequestOutput) -> list[dict[str, Any]]:
    """All choices; the event loop does not wait while a long text is taken apart."""
    if sum(len(completion.text) for completion in output.outputs) < _LONG:
        return choices.whole(output)
    return await asyncio.to_thread(choices.whole, output)


async def _events(
    body: ChatCompletionRequest,
    stream: AsyncGenerator[RequestOutput, None],
    choices: ChatChoices,
    head: dict[str, Any],
) -> AsyncGenerator[bytes, None]:
    """For each choice a chunk with the role, chunks with content, one with the finish reason; then the usage."""
    options = body.stream_options
    with_usage = bool(options and options.include_usage)
    continuous = bool(options and options.continuous_usage_stats)
    usage = Usage()
    begun = False
    async with aclosing(stream) as outputs:
        async for output in outputs:
            usage.add(0, output)
            pieces = list(choices.pieces(output))
            usage.reasoning_tokens = choices.reasoning_tokens
            extra = {"usage": usage.to_json() if continuous else None} if with_usage or continuous else {}
            chunks = [{**head, "choices": [piece], **extra} for piece in pieces]
            if chunks and not begun:
                begun = True
                chunks[0] |= choices.of_prompt(output)
            if chunks:
                yield b"".join(map(event, chunks))
    if with_usage:
        yield event({**head, "choices": [], "usage": usage.to_json()})
    yield DONE
