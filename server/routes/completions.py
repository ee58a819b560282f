"""POST /v1/completions: one or more prompts, as text or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.async_llm import PreparedRequest
from server.answers import json_answer
from server.body import beside, read_body
from server.chunks import Chunks
from server.completion_choices import CompletionChoices
from server.convert import named_as_sent, sampling_params
from server.failures import Failures
from server.protocol.completions import CompletionRequest
from server.protocol.fields import body_schema
from server.serving import Serving, serving
from server.stream import EventStream
from server.usage import total_usage
from server.waiting import finals, unless_gone

router = APIRouter()


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def create_completion(http: Request) -> Response:
    """Continues prompts."""
    body = await read_body(http, CompletionRequest)
    state = serving(http)
    state.check(body.model)
    head = state.head(http, body, "cmpl", "text_completion")
    with named_as_sent(body):
        params = await beside(http, lambda: sampling_params(body, state.config.override_generation_config))
        prepared = await unless_gone(http, _prepare(state, body, params, head["id"]))
    form = state.logprob_format(body)
    texts = await unless_gone(http, _echoed(state, body, prepared)) if body.echo else [None] * len(prepared)
    makers = [
        CompletionChoices(p, body, form, first_index=i * params.n, prompt_text=text)
        for i, (p, text) in enumerate(zip(prepared, texts, strict=True))
    ]
    streams = [state.llm.stream(p) for p in prepared]
    failures = Failures(len(prepared) * params.n, head["id"])
    if body.stream:
        return EventStream(streams, Chunks(head, body.stream_options, makers, failures))
    outputs = await unless_gone(http, finals(streams))
    failures.check(outputs)

    def answer() -> dict[str, Any]:
        choices = [choice for maker, output in zip(makers, outputs, strict=True) for choice in maker.pieces(output)]
        return {**head, "choices": choices, "usage": total_usage(outputs).to_json()}

    return await json_answer(answer, outputs)


async def _prepare(
    state: Serving, body: CompletionRequest, params: SamplingParams, request_id: str
) -> list[PreparedRequest]:
    """All prompts checked before any is started."""
    special = body.add_special_tokens is not False
    return await state.prepare_all(body, body.prompt, params, request_id, add_special_tokens=special)


async def _echoed(
    state: Serving, body: CompletionRequest, prepared: Sequence[PreparedRequest]
) -> list[tuple[str, list[int]]]:
    """The prompts' texts and their tokens' places: without what was cut off."""
    as_given = body.truncate_prompt_tokens is None
    return [await state.llm.prompt_text(each, as_given=as_given) for each in prepared]
