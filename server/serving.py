"""What the routes share: the engine, the names it is served under, and the start of every answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from jaxpaged import __version__
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.errors import EngineDeadError
from server.convert import LogprobFormat
from server.errors import APIError
from server.protocol import GenerationRequest


@dataclass(frozen=True)
class Serving:
    """Attributes:
    llm: the engine.
    model_names: names that requests may use; answers carry the first one.
    created: Unix time that /v1/models reports.
    """

    llm: AsyncLLM
    model_names: Sequence[str]
    created: int = field(default_factory=lambda: int(time.time()))

    def check(self, model: str | None) -> None:
        """Raises: APIError 404 if no model of that name is served; EngineDeadError if nothing is."""
        if not self.llm.is_healthy:
            raise EngineDeadError("the engine is shutting down" if self.llm.error is None else "the engine has failed")
        if model is not None and model not in self.model_names:
            known = ", ".join(self.model_names)
            raise APIError(
                404, f"the model {model!r:.80} does not exist; served: {known}", param="model", code="model_not_found"
            )

    def head(self, http: Request, body: GenerationRequest, prefix: str, kind: str) -> dict[str, Any]:
        """The fields that all of an answer's objects begin with."""
        request_id = body.request_id or http.state.request_id
        return {
            "id": f"{prefix}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model or self.model_names[0],
            "system_fingerprint": f"jaxpaged-{__version__}",
        }

    def logprob_format(self, body: GenerationRequest) -> LogprobFormat:
        """How this request wants its logprobs."""
        hidden = frozenset() if body.skip_special_tokens is False else self.llm.tokenizer.special_ids
        return LogprobFormat(as_ids=bool(body.return_tokens_as_token_ids), hidden_ids=hidden)


def serving(http: Request) -> Serving:
    """The Serving of the app that handles this request."""
    return http.app.state.serving
