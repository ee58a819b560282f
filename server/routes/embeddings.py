"""POST /v1/embeddings: a vector for each text, from the same engine and steps as generated text."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.async_llm import PreparedRequest
from jaxpaged.engine.output import RequestOutput
from jaxpaged.errors import InvalidRequestError
from server.body import read_body
from server.errors import APIError
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.fields import body_schema
from server.serving import Serving, serving
from server.stream import finals, unless_gone

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingRequest))
async def create_embeddings(http: Request) -> Response:
    """Embeds texts."""
    body = await read_body(http, EmbeddingRequest)
    state = serving(http)
    state.check(body.model)
    answer_id = f"embd-{body.request_id or http.state.request_id}"
    prepared = await unless_gone(http, _prepare(state, body, answer_id))
    outputs = await unless_gone(http, finals([state.llm.stream(p) for p in prepared]))
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    answer = {
        "id": answer_id,
        "object": "list",
        "created": int(time.time()),
        "model": body.model or state.model_names[0],
        "data": await _data(body, outputs),
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _prepare(state: Serving, body: EmbeddingRequest, answer_id: str) -> list[PreparedRequest]:
    """All inputs checked before any is started."""
    switches = (body.normalize, body.use_activation)
    pooling = PoolingParams(pooling=body.pooling, dimensions=body.dimensions, normalize=False not in switches)
    params = SamplingParams(
        max_tokens=None,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        detokenize=False,
        output_kind="final",
    )
    return await asyncio.gather(
        *(_prepare_one(state, body, i, params, pooling, f"{answer_id}-{i}") for i in range(len(body.input)))
    )


async def _prepare_one(
    state: Serving, body: EmbeddingRequest, index: int, params: SamplingParams, pooling: PoolingParams, request_id: str
) -> PreparedRequest:
    special = body.add_special_tokens is not False
    try:
        return await state.prepare(
            body, body.input[index], params, request_id, add_special_tokens=special, pooling=pooling
        )
    except InvalidRequestError as error:
        if error.param == "prompt":
            which = f"input[{index}]" if len(body.input) > 1 else "input"
            error.args, error.param = (f"{which}: {error}",), "input"
        raise


async def _data(body: EmbeddingRequest, outputs: list[RequestOutput]) -> list[msgspec.Raw]:
    """The vectors as JSON objects. Of many long ones the event loop writes one at a time."""
    data: list[msgspec.Raw] = []
    for index, output in enumerate(outputs):
        shown = _encoded(body, index, output)
        data.append(msgspec.Raw(msgspec.json.encode({"object": "embedding", "index": index, "embedding": shown})))
        await asyncio.sleep(0)
    return data


def _encoded(body: EmbeddingRequest, index: int, output: RequestOutput) -> Any:
    vector = output.embedding
    if vector is None:
        status = 503 if output.finish_reason == "abort" else 500
        raise APIError(status, f"input[{index}] has no embedding: {output.stop_reason or output.finish_reason}")
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector.tolist()
