"""POST /v1/completions: one or more prompts, as text or token ids."""

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
from jaxpaged.engine.output import CompletionOutput
from server.body import read_body
from server.convert import LogprobFormat, Usage, completion_params, total_usage
from server.protocol import CompletionRequest, body_schema
from server.serving import Serving, serving
from server.stream import DONE, event, event_stream, finals, merged, unless_gone

router = APIRouter()


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def create_completion(http: Request) -> Response:
    """Continues prompts."""
    body = await read_body(http, CompletionRequest)
    state = serving(http)
    state.check(body.model)
    params = completion_params(body)
    head = state.head(http, body, "cmpl", "text_completion")
    prepared = await unless_gone(http, _prepare(state, body, params, head["id"]))
    form = state.logprob_format(body)
    if body.stream:
        return await event_stream(http, _events(state, body, params, prepared, head, form))
    streams = [state.llm.stream(p) for p in prepared]
    outputs = await unless_gone(http, finals(streams))
    choices = [
        _choice(i, output.outputs[0], params, form, len(output.outputs[0].text)) for i, output in enumerate(outputs)
    ]
    answer = {**head, "choices": choices, "usage": total_usage(outputs).to_json()}
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _prepare(
    state: Serving, body: CompletionRequest, params: SamplingParams, request_id: str
) -> list[PreparedRequest]:
    """All prompts checked before any is started."""
    special = body.add_special_tokens is not False
    prepared = [state.llm.prepare(prompt, params, request_id, add_special_tokens=special) for prompt in body.prompt]
    return await asyncio.gather(*prepared)


async def _events(
    state: Serving,
    body: CompletionRequest,
    params: SamplingParams,
    prepared: list[PreparedRequest],
    head: dict[str, Any],
    form: LogprobFormat,
) -> AsyncGenerator[bytes, None]:
    options = body.stream_options
    with_usage = bool(options and options.include_usage)
    continuous = bool(options and options.continuous_usage_stats)
    usage = Usage()
    streams = [state.llm.stream(p) for p in prepared]
    async with aclosing(merged(streams)) as outputs:
        async for index, output in outputs:
            usage.add(index, output)
            chunk = {**head, "choices": [_choice(index, output.outputs[0], params, form, None)]}
            if with_usage or continuous:
                chunk["usage"] = usage.to_json() if continuous else None
            yield event(chunk)
    if with_usage:
        yield event({**head, "choices": [], "usage": usage.to_json()})
    yield DONE


def _choice(
    index: int, completion: CompletionOutput, params: SamplingParams, form: LogprobFormat, num_chars: int | None
) -> dict[str, Any]:
    logprobs = None
    if completion.logprobs is not None:
        logprobs = form.completion(completion.logprobs, num_chars, with_top=bool(params.logprobs))
    return {
        "index": index,
        "text": completion.text,
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
