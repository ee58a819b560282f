"""A line when a request starts, one when it ends. Neither tells what it says: no prompt, no output, no key."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.observer import RequestEnd, StepTokens, WatchedRequest
from jaxpaged.engine.stats import EngineStats
from server.errors import without_details
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from server.watch.http_requests import CURRENT, NO_ROUTE, HttpRequest

logger = logging.getLogger("jaxpaged.requests")
# Numbers and switches only: all others hold what the user wrote.
_TOLD = (
    "n", "best_of", "temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "max_tokens", "timeout", "logprobs", "prompt_logprobs", "ignore_eos",
    "use_beam_search", "beam_width",
)  # fmt: skip
# Names that an error may blame; another one may be the user's own word.
_BODIES = (ChatCompletionRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest)
_FIELDS = frozenset(SamplingParams.__struct_fields__).union(*(body.known_names() | {*body.not_yet} for body in _BODIES))


class RequestLog:
    """Observes requests. One that ends with an error is always logged, as a warning.

    Args:
      model_name: what is served.
      enabled: log every request.
    """

    def __init__(self, model_name: str, *, enabled: bool):
        self._model_name, self._enabled = model_name, enabled
        self._http_ids: dict[WatchedRequest, str] = {}  # of live requests: they end in nobody's context

    def on_added(self, request: WatchedRequest) -> None:
        """Logs the start."""
        http = CURRENT.get()
        if http is not None:
            self._http_ids[request] = http.request_id
        if not self._enabled:
            return
        logger.info(
            "request %s: %s, model %s, %d prompt tokens, %s",
            printable(request.request_id),
            "no HTTP request" if http is None else f"{http.method} {http.route}",
            self._model_name,
            request.num_prompt_tokens,
            _summary(request.params),
        )

    def on_step(self, core_index: int, stats: EngineStats, tokens: StepTokens) -> None:
        """Not logged."""

    def on_finished(self, request: WatchedRequest, end: RequestEnd) -> None:
        """Logs the end."""
        http_id = self._http_ids.pop(request, "-")
        failed = end.reason == "error"
        if not failed and not self._enabled:
            return
        metrics = end.metrics
        first, finished = metrics.time_to_first_token, metrics.finished_time
        detail = f" ({without_details(end.detail)})" if end.detail else ""  # they may hold the user's words
        logger.log(
            logging.WARNING if failed else logging.INFO,
            "request %s: %s%s after %d tokens, first token after %s s, %s s in all",
            printable(request.request_id),
            end.reason,
            detail,
            metrics.num_output_tokens,
            "-" if first is None else f"{first:.3f}",
            "-" if finished is None else f"{finished - metrics.arrival_time:.3f}",
            extra={"request_id": http_id},
        )


def log_refusal(request: HttpRequest, status: int, *, enabled: bool) -> None:
    """Logs an answer that is an error: one of 5xx always, others if `enabled`. Nothing of what it says is told."""
    if status < 500 and not enabled:
        return
    code, param = request.error
    details = [f"code {code}"] * bool(code) + [f"param {param}"] * (param in _FIELDS)
    logger.log(
        logging.WARNING if status >= 500 else logging.INFO,
        "%s %s was answered %d%s",
        request.method,
        _path_of_ours(request.scope) if request.route == NO_ROUTE else request.route,
        status,
        f" ({', '.join(details)})" if details else "",
        extra={"request_id": request.request_id},
    )


def _path_of_ours(scope: Any) -> str:
    """The path of who was turned away before a route was looked for, if there is such a route: others may be words."""
    return scope["path"] if scope["path"] in _paths(scope["app"].routes) else NO_ROUTE


def _paths(routes: Iterable[Any]) -> Iterator[str]:
    for route in routes:
        router = getattr(route, "original_router", None)  # FastAPI keeps the routers that it includes as they are
        if router is not None:
            yield from _paths(router.routes)
        elif hasattr(route, "path"):
            yield route.path


def printable(request_id: str) -> str:
    """An id of the client's as it may stand in a line."""
    return request_id if request_id.isprintable() else repr(request_id)


def _summary(params: SamplingParams) -> str:
    """What a request asks for besides the defaults; of what holds the user's words, only that it is there."""
    parts = []
    for field in msgspec.structs.fields(SamplingParams):
        value = getattr(params, field.name)
        if field.name == "max_tokens":
            parts.append(f"max_tokens={value}")
        elif value != field.default and field.name in _TOLD:
            parts.append(f"{field.name}={value}")
        elif value != field.default and field.name != "output_kind":
            parts.append(field.name)
    return " ".join(parts)
