"""A line every few seconds, while there is work, on how much of it is done."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from jaxpaged.engine.observer import RequestEnd, StepTokens, WatchedRequest
from jaxpaged.engine.stats import EngineStats

logger = logging.getLogger("jaxpaged.stats")
SECONDS = 10.0


@dataclass(slots=True)
class _Core:
    """A core's latest stats, and those of the last line; tokens generated since then."""

    now: EngineStats = field(default_factory=EngineStats)
    told: EngineStats = field(default_factory=EngineStats)
    num_generated_tokens: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether anything was done since the last line, or is to be done."""
        return self.now.num_steps != self.told.num_steps or self.now.num_running + self.now.num_waiting > 0


class StatsLog:
    """Observes cores. A timer runs from the first step on until nothing has happened for a whole period.

    Args:
      seconds: the period.
    """

    def __init__(self, seconds: float = SECONDS):
        self._seconds = seconds
        self._cores: dict[int, _Core] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0

    def on_added(self, request: WatchedRequest) -> None:
        """Not logged."""

    def on_step(self, core_index: int, stats: EngineStats, tokens: StepTokens) -> None:
        """Takes in a step."""
        core = self._cores.get(core_index)
        if core is None:
            core = self._cores[core_index] = _Core()
        core.now = stats
        core.num_generated_tokens += tokens.num_generated_tokens
        if self._timer is None and core.is_busy:
            self._since = time.monotonic()
            self._wait()

    def on_finished(self, request: WatchedRequest, end: RequestEnd) -> None:
        """Not logged."""

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._tell)

    def _tell(self) -> None:
        now = time.monotonic()
        seconds, self._since, self._timer = now - self._since, now, None
        busy = {index: core for index, core in sorted(self._cores.items()) if core.is_busy}
        for index, core in busy.items():
            logger.info("engine %d: %s", index, _line(core, seconds))
            core.told, core.num_generated_tokens = core.now, 0
        if busy:
            self._wait()


def _line(core: _Core, seconds: float) -> str:
    now, told = core.now, core.told
    queries = now.prefix_cache_queries - told.prefix_cache_queries
    hits = now.prefix_cache_hits - told.prefix_cache_hits
    prompt_tokens = now.num_prompt_tokens - told.num_prompt_tokens
    return (
        f"prompt {prompt_tokens / seconds:.1f} tokens/s, "
        f"generation {core.num_generated_tokens / seconds:.1f} tokens/s, "
        f"{now.num_running} running, {now.num_waiting} waiting, KV cache {now.kv_cache_usage:.1%} used, "
        f"prefix cache hits {f'{hits / queries:.1%}' if queries > 0 else '-'}"
    )
