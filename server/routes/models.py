"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from server.errors import APIError
from server.serving import Serving, serving

router = APIRouter()
_ALLOWED = {
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}
"""What every key may do with the model, in the words of OpenAI's first models."""


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
        "permission": [{"id": f"modelperm-{name}", "object": "model_permission", "created": state.created, **_ALLOWED}],
    }
