"""Who watches the requests of an AsyncLLM: metrics, logs, traces. Everything here is called in the readers' event loop;
of requests that were live when it was closed, by whoever finds out.

Each request that a core has been given is told of twice: `on_added` once, and later `on_finished` once, whatever ended
it. `on_step` comes between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.output import RequestMetrics
from jaxpaged.engine.stats import EngineStats

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class WatchedRequest:
    """A request on its way through a core. The same object is given to `on_added` and `on_finished`.

    Attributes:
      request_id: the caller's id; need not be unique.
      num_prompt_tokens: length of its prompt.
      params: what it asked for.
      core_index: which core serves it.
    """

    request_id: str
    num_prompt_tokens: int
    params: SamplingParams
    core_index: int = 0


@dataclass(slots=True)
class RequestEnd:
    """How a request ended.

    Attributes:
      reasons: of each of its samples: "stop", "length", "abort" or "error"; empty if its core refused it.
      metrics: its times, and how many tokens it got.
      num_cached_tokens: prompt tokens found in the prefix cache.
      detail: what went wrong, if something did; "timeout"; else None.
    """

    reasons: list[str]
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    detail: str | None = None

    @property
    def reason(self) -> str:
        """The reason of the request as a whole: the worst of its samples'; "refused" if its core refused it."""
        return max(self.reasons, key=_SEVERITY.index) if self.reasons else "refused"


_SEVERITY = ("stop", "length", "abort", "error")


@dataclass(slots=True)
class StepTokens:
    """What one core's step brought to its requests.

    Attributes:
      num_prompt_tokens: the prompts, cached tokens included, of those that got their first token, or all they wanted
        without one.
      num_cached_tokens: of these, tokens found in the prefix cache.
      num_generated_tokens: new tokens of all requests.
      first_token_seconds: of each request that got its first one, the time since its arrival.
      inter_token_seconds: of each other token, the time since the sample's last one; of several that came at once, an
        equal share of it.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    inter_token_seconds: list[float] = field(default_factory=list)


class Observer(Protocol):
    """Is told what happens."""

    def on_added(self, request: WatchedRequest) -> None:
        """A request has been given to its core. Called in the context of whoever reads its stream."""

    def on_step(self, core_index: int, stats: EngineStats, tokens: StepTokens) -> None:
        """A core has told how it is, as it does after every step and whenever it has become idle."""

    def on_finished(self, request: WatchedRequest, end: RequestEnd) -> None:
        """A request has ended: it is done, was aborted, was refused by its core, or its core has died."""


class Observers:
    """Several observers as one. What one of them raises is logged once and stops nothing."""

    def __init__(self, *observers: Observer):
        self._observers = list(observers)
        self._failed: set[int] = set()

    def add(self, observer: Observer) -> None:
        """One more."""
        self._observers.append(observer)

    def on_added(self, request: WatchedRequest) -> None:
        self._tell(lambda observer: observer.on_added(request))

    def on_step(self, core_index: int, stats: EngineStats, tokens: StepTokens) -> None:
        self._tell(lambda observer: observer.on_step(core_index, stats, tokens))

    def on_finished(self, request: WatchedRequest, end: RequestEnd) -> None:
        self._tell(lambda observer: observer.on_finished(request, end))

    def _tell(self, what: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                what(observer)
            except Exception:
                if id(observer) not in self._failed:
                    self._failed.add(id(observer))
                    logger.exception("%s failed; further failures of it are not logged", type(observer).__name__)
