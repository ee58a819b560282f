"""What an engine core needs of its engine: the engine itself, or one that stands for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxpaged.config import EngineConfig
from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.request import Grammar, Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import RequestUpdate
from jaxpaged.engine.stats import EngineStats


class EngineLike(Protocol):
    """`make_request` may be called in any thread; all else only in the one that steps."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def pooling(self) -> str: ...
    @property
    def num_programs(self) -> int: ...
    @property
    def warm_programs(self) -> Mapping[str, Sequence[int]]: ...
    @property
    def cold_programs(self) -> Mapping[str, Sequence[int]]: ...
    @property
    def stats(self) -> EngineStats: ...
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
        pooling: PoolingParams | None = None,
        arrival_time: float | None = None,
    ) -> Request: ...
    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: str, index: int | None = None) -> list[RequestUpdate]: ...
    def step(self) -> list[RequestUpdate]: ...
    def use_idle_time(self) -> bool: ...
