"""What the routes share: the engine, the names it is served under, and the start of every answer."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from jaxpaged import __version__
from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.async_llm import AsyncLLM, PreparedRequest
from jaxpaged.errors import EngineDeadError, RequestTooLargeError
from server.chat.plan import ChatFormats
from server.config import ServerConfig
from server.errors import APIError
from server.logprobs import LogprobFormat
from server.protocol.body import EngineBody
from server.protocol.generation import GenerationRequest

T = TypeVar("T")


@dataclass(frozen=True)
class Serving:
    """Attributes:
    llm: the engine.
    config: the server's options.
    created: Unix time that /v1/models reports.
    """

    llm: AsyncLLM
    config: ServerConfig
    created: int = field(default_factory=lambda: int(time.time()))

    @functools.cached_property
    def chat_formats(self) -> ChatFormats:
        """How the model writes calls and thoughts."""
        return ChatFormats.of(self.config, self.llm.tokenizer)

    @property
    def model_names(self) -> Sequence[str]:
        """Names that requests may use; answers carry the first one."""
        return self.config.served_model_name or (self.llm.config.model,)

    def check_health(self) -> None:
        """Raises: EngineDeadError if no requests are served any more."""
        if not self.llm.is_healthy:
            raise EngineDeadError("the engine is shutting down" if self.llm.error is None else "the engine has failed")

    def check(self, model: str | None) -> None:
        """Raises: APIError 404 if no model of that name is served; EngineDeadError if nothing is."""
        self.check_health()
        if model is not None and model not in self.model_names:
            known = ", ".join(self.model_names)
            raise APIError(
                404, f"the model {model!r:.80} does not exist; served: {known}", param="model", code="model_not_found"
            )

    def head(self, http: Request, body: GenerationRequest, prefix: str, kind: str) -> dict[str, Any]:
        """The fields that all of an answer's objects begin with."""
        request_id = body.request_id or http.state.request_id
        tier = {} if body.service_tier is None else {"service_tier": "default"}
        return {
            "id": f"{prefix}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model_names[0],
            "system_fingerprint": f"jaxpaged-{__version__}",
            **tier,
        }

    async def prepare_all(
        self,
        body: EngineBody,
        prompts: Sequence[str | list[int]],
        params: SamplingParams,
        request_id: str,
        **options: Any,
    ) -> list[PreparedRequest]:
        """As `prepare`, for several prompts, one after the other: those of others come in between."""
        params = self.capped(params)  # once, so that all share it
        return [await self.prepare(body, prompt, params, request_id, **options) for prompt in prompts]

    async def prepare(
        self,
        body: EngineBody,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str,
        *,
        add_special_tokens: bool = True,
        pooling: PoolingParams | None = None,
    ) -> PreparedRequest:
        """Validates and tokenizes one prompt; caps its timeout at `--request-timeout`.

        Args:
          pooling: for one vector of the prompt, instead of a continuation.
        """
        context = self.llm.config.max_model_len
        too_long = context is not None and len(prompt) + (pooling is None) > context
        if too_long and not isinstance(prompt, str) and params.truncate_prompt_tokens is None:
            # Before a million ids are looked at one by one.
            raise RequestTooLargeError(
                f"the prompt has {len(prompt)} tokens, but the context holds {context}", param="prompt"
            )
        return await self.llm.prepare(
            prompt,
            self.capped(params),
            request_id,
            add_special_tokens=add_special_tokens,
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
            pooling=pooling,
        )

    def capped(self, params: SamplingParams) -> SamplingParams:
        """Parameters whose timeout is no longer than `--request-timeout`: the same ones where that holds already."""
        limit = self.config.request_timeout
        if limit is None or (params.timeout is not None and params.timeout <= limit):
            return params
        return msgspec.structs.replace(params, timeout=limit)

    def logprob_format(self, body: GenerationRequest) -> LogprobFormat:
        """How this request wants its logprobs."""
        hidden = frozenset() if body.skip_special_tokens is False else self.llm.tokenizer.special_ids
        return LogprobFormat(self.llm.tokenizer, as_ids=bool(body.return_tokens_as_token_ids), hidden_ids=hidden)


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Awaits an answer of the cores, for so long.

    Raises:
      APIError: 504 if they do not.
    """
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise APIError(504, f"the engine has not answered within {seconds:g} seconds", code="engine_timeout") from None


def serving(http: Request) -> Serving:
    """The Serving of the app that handles this request."""
    return http.app.state.serving
