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
from jaxpaged.engine.output import RequestOutput
from jaxpaged.text.chat import check_template_options
from server.body import read_body
from server.chat_choices import ChatChoices
from server.convert import Usage, named_as_sent, sampling_params, total_usage
from server.protocol.chat import ChatCompletionRequest
from server.protocol.fields import body_schema
from server.serving import Serving, serving
from server.stream import DONE, event, event_stream, finals, unless_gone

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
async def create_chat_completion(http: Request) -> Response:
    """Answers a conversation."""
    body = await read_body(http, ChatCompletionRequest)
    state = serving(http)
    state.check(body.model)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = state.head(http, body, "chatcmpl", kind)
    with named_as_sent(body):
        params = sampling_params(body, state.config.override_generation_config)
        prepared = await unless_gone(http, _prepare(state, body, params, head["id"]))
    choices = ChatChoices(body, state.logprob_format(body))
    stream = state.llm.stream(prepared)
    if body.stream:
        return await event_stream(http, _events(body, stream, choices, head))
    (output,) = await unless_gone(http, finals([stream]))
    answer = {
        **head,
        "choices": choices.whole(output),
        "usage": total_usage([output]).to_json(),
        **choices.of_prompt(output),
    }
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
        cut=params.truncate_prompt_tokens is not None,
        **options,
    )
    return await state.prepare(body, ids, params, request_id)


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
            extra = {"usage": usage.to_json() if continuous else None} if with_usage or continuous else {}
            chunks = [{**head, "choices": [choice], **extra} for choice in choices.pieces(output)]
            if chunks and not begun:
                begun = True
                chunks[0] |= choices.of_prompt(output)
            if chunks:
                yield b"".join(map(event, chunks))
    if with_usage:
        yield event({**head, "choices": [], "usage": usage.to_json()})
    yield DONE
