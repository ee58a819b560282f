"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from server.errors import APIError
from server.serving import Serving, serving

router = APIRouter()


@router.get("/v1/models")
async def list_models(http: Request) -> dict[str, Any]:
    """All served names."""
    state = serving(http)
    return {"object": "list", "data": [_card(state, name) for name in state.model_names]}


@router.get("/v1/models/{name:path}")
async def get_model(http: Request, name: str) -> dict[str, Any]:
    """One served name."""
    state = serving(http)
    if name not in state.model_names:
        raise APIError(404, f"the model {name!r:.80} does not exist", param="model", code="model_not_found")
    return _card(state, name)


def _card(state: Serving, name: str) -> dict[str, Any]:
    config = state.llm.config
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "jaxpaged",
        "root": config.model,
        "parent": None,
        "max_model_len": config.max_model_len,
    }
