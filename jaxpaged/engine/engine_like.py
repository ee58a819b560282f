"""What the front of an engine needs of it: the engine itself, or one that stands for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxpaged.config import EngineConfig
from jaxpaged.core.request import Grammar, Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import RequestUpdate


class EngineLike(Protocol):
    """What AsyncLLM needs of an engine. Only the engine thread calls `add_request`, `abort` and `step`."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    def make_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        bad_word_ids: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
        arrival_time: float | None = None,
    ) -> Request: ...
    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: str, index: int | None = None) -> list[RequestUpdate]: ...
    def step(self) -> list[RequestUpdate]: ...
