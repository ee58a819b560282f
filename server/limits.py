"""How much one request may ask for, as the operator sets it. See `ServerConfig.max_n` and those that follow it."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from server.config import ServerConfig
from server.errors import APIError, shown
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.generation import GenerationRequest


def check_limits(body: BaseModel, config: ServerConfig) -> None:
    """Raises: APIError 400, naming the field that asks for too much."""
    for field, count, most in _counts(body, config):
        if count > most:
            raise APIError(400, f"{field} asks for {shown(count)}, and this server allows {most}", param=field)


def _counts(body: BaseModel, config: ServerConfig) -> Iterator[tuple[str, int, int]]:
    """Fields, how much they ask for, and the most of it."""
    if isinstance(body, GenerationRequest):
        yield "n", body.n or 1, config.max_n
        yield "best_of", body.best_of or 1, config.max_n
        yield "beam_width", body.beam_width or 1, config.max_n
        yield "stop", 0 if body.stop is None else 1 if isinstance(body.stop, str) else len(body.stop), config.max_stop
        yield "stop_token_ids", len(body.stop_token_ids or ()), config.max_stop_token_ids
        yield "logit_bias", len(body.logit_bias or ()), config.max_logit_bias
    if isinstance(body, CompletionRequest):
        yield "prompt", len(body.prompt), config.max_prompts
    if isinstance(body, EmbeddingRequest):
        yield "input", len(body.input), config.max_inputs
