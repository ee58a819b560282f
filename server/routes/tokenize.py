"""POST /tokenize and POST /detokenize: what the model's tokenizer and chat template make of a request."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.body import beside, read_body
from server.chat.plan import ChatPlan
from server.protocol.fields import body_schema
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from server.serving import Serving, serving
from server.waiting import unless_gone

router = APIRouter()


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
async def tokenize(http: Request) -> Response:
    """The tokens of a text or a conversation."""
    body = await read_body(http, TokenizeRequest)
    state = serving(http)
    state.check(body.model)
    ids = await unless_gone(http, _encode(http, body))
    names = await asyncio.to_thread(_names, state, ids) if body.return_token_strs else None
    max_model_len = state.llm.config.max_model_len
    return _json({"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": names})


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
async def detokenize(http: Request) -> Response:
    """The text of tokens, control tokens included."""
    body = await read_body(http, DetokenizeRequest)
    state = serving(http)
    state.check(body.model)
    text = await unless_gone(http, state.llm.decode(body.tokens, skip_special_tokens=False))
    return _json({"prompt": text})


async def _encode(http: Request, body: TokenizeRequest) -> list[int]:
    state = serving(http)
    if body.prompt is not None:
        return await state.llm.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    plan = await beside(http, lambda: ChatPlan(body.chat(), state.chat_formats, state.config, state.llm.tokenizer))
    return await state.llm.render_chat(await beside(http, lambda: plan.messages), **plan.template_options)


def _names(state: Serving, ids: list[int]) -> list[str]:
    """The tokens' names in the vocabulary, as Hugging Face's tokenizer tells them."""
    return [str(state.llm.tokenizer.piece(i)) for i in ids]


def _json(answer: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
