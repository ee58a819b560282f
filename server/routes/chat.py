"""POST /v1/chat/completions: a conversation through the model's chat template."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.async_llm import PreparedRequest
from jaxpaged.errors import InvalidRequestError
from server.answers import json_answer
from server.body import beside, read_body
from server.chat.choices import ChatChoices
from server.chat.parsed_choices import ParsedChoices
from server.chat.plan import ChatPlan
from server.chat.reasoning import Prompted
from server.chunks import Chunks
from server.convert import named_as_sent, sampling_params
from server.failures import Failures
from server.protocol.chat import ChatCompletionRequest
from server.protocol.fields import body_schema
from server.serving import Serving, serving
from server.stream import EventStream
from server.usage import total_usage
from server.waiting import finals, unless_gone

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
        plan, params = await beside(http, lambda: _planned(state, body))
        prepared, before = await unless_gone(http, _prepare(http, body, plan, params, head["id"]))
    choices = _choices(state, body, plan, before)
    stream = state.llm.stream(prepared)
    failures = Failures(params.n, head["id"])
    if body.stream:
        return EventStream([stream], Chunks(head, body.stream_options, [choices], failures))
    outputs = await unless_gone(http, finals([stream]))
    failures.check(outputs)
    (output,) = outputs

    def answer() -> dict[str, Any]:
        answered = choices.whole(output)
        usage = total_usage(outputs)
        usage.reasoning_tokens = choices.reasoning_tokens
        return {**head, "choices": answered, "usage": usage.to_json(), **choices.of_prompt(output)}

    return await json_answer(answer, outputs)


def _planned(state: Serving, body: ChatCompletionRequest) -> tuple[ChatPlan, SamplingParams]:
    if body.choice == "auto" and not state.config.enable_auto_tool_choice:
        raise InvalidRequestError('tool_choice="auto" needs a server with enable_auto_tool_choice', param="tools")
    plan = ChatPlan(body, state.chat_formats, state.config, state.llm.tokenizer)
    return plan, sampling_params(body, state.config.override_generation_config)


async def _prepare(
    http: Request, body: ChatCompletionRequest, plan: ChatPlan, params: SamplingParams, request_id: str
) -> tuple[PreparedRequest, Prompted]:
    """The request, and what its prompt has said of thoughts."""
    state = serving(http)
    messages = await beside(http, lambda: plan.messages)
    ids = await state.llm.render_chat(messages, **plan.template_options)
    answers = await beside(http, lambda: plan.of_answers(params, ids))
    return await state.prepare(body, ids, answers.params, request_id), answers.before


def _choices(state: Serving, body: ChatCompletionRequest, plan: ChatPlan, before: Prompted) -> ChatChoices:
    form = state.logprob_format(body)
    return ParsedChoices(body, form, plan, before, state.llm.tokenizer) if plan.parses else ChatChoices(body, form)
