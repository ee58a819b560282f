"""POST /v1/embeddings: a vector for each text, from the same engine and steps as generated text."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.async_llm import PreparedRequest
from jaxpaged.engine.output import RequestOutput
from jaxpaged.errors import InvalidRequestError
from server.answers import written
from server.body import read_body
from server.errors import APIError
from server.failures import told_reason
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.fields import body_schema
from server.serving import Serving, serving
from server.waiting import finals, unless_gone

NUMBERS_A_TOKEN = 8  # that take as long to write

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
        "model": state.model_names[0],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    vectors = [_vector(index, output) for index, output in enumerate(outputs)]
    size = sum(vector.size for vector in vectors) // NUMBERS_A_TOKEN
    content = await written(size, _encoded, answer, body, vectors)
    return Response(content, media_type="application/json")


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
    params = state.capped(params)  # once, so that all share it
    return [
        await _prepare_one(state, body, i, params, pooling, f"{answer_id}-{i}")  # one by one: others get their turn
        for i in range(len(body.input))
    ]


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


def _vector(index: int, output: RequestOutput) -> np.ndarray:
    if output.embedding is None:
        status = 503 if output.finish_reason == "abort" else 500
        why = told_reason(output.stop_reason or output.finish_reason)
        raise APIError(status, f"input[{index}] has no embedding: {why}")
    return output.embedding


def _encoded(
    answer: dict[str, Any], body: EmbeddingRequest, vectors: Sequence[np.ndarray], encode: Callable[[Any], bytes]
) -> bytes:
    """The answer with its data, a vector at a time: while one is encoded, no other thread runs."""
    data = b",".join(
        encode({"object": "embedding", "index": index, "embedding": _shown(body, vector)})
        for index, vector in enumerate(vectors)
    )
    return encode(answer)[:-1] + b',"data":[' + data + b"]}"


def _shown(body: EmbeddingRequest, vector: np.ndarray) -> str | list[float]:
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector.tolist()
