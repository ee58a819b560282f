"""Who goes first: each scheduling policy is a sort key of the request, smaller first.

A key is fixed when a request arrives and never changes, although requests age: each waits at the same rate, so what
ageing changes is how much an earlier arrival is worth against priority or length, and that is known at once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from numbers import Real

from jaxpaged.config import EngineConfig
from jaxpaged.core.request import Request
from jaxpaged.errors import ConfigError

PolicyKey = Callable[[Request], tuple[float, float]]

_SPF_UNIT = 1000  # prompt tokens that `ageing` seconds of waiting make up for


def policy_key(config: EngineConfig) -> PolicyKey:
    """The engine's order of requests.

    Returns:
      A function of a request: (rank, arrival time), to be compared as tuples. So among equals the earlier goes first;
      and with `ageing` a request is overtaken only by those that arrive within a time known at its own arrival.
    """
    if config.scheduling_key is not None:
        return _aged(_checked(config.scheduling_key), config.ageing)
    if config.scheduling_policy == "priority":
        return _aged(lambda request: request.priority, config.ageing)
    if config.scheduling_policy == "spf":
        return _aged(lambda request: request.num_prompt_tokens / _SPF_UNIT, config.ageing)
    return lambda request: (request.arrival_time, request.arrival_time)


def _aged(cost: Callable[[Request], float], ageing: float) -> PolicyKey:
    """Smaller cost first; `ageing` seconds of waiting take one from it, if it is not 0."""
    if not ageing:
        return lambda request: (cost(request), request.arrival_time)
    # In seconds: a very small `ageing` as a divisor would overflow.
    return lambda request: (cost(request) * ageing + request.arrival_time, request.arrival_time)


def _checked(key: Callable[[Request], float]) -> Callable[[Request], float]:
    """The user's key; a value that cannot be compared with the others is refused, as NaN would break the order."""
    name = getattr(key, "__name__", type(key).__name__)

    def checked(request: Request) -> float:
        rank = key(request)
        if isinstance(rank, Real) and not isinstance(rank, bool):
            with contextlib.suppress(OverflowError):  # an integer beyond all floats
                if math.isfinite(cost := float(rank)):
                    return cost
        raise ConfigError(
            f"scheduling_key {name} gave {rank!r:.80} for request {request.request_id!r}, not a finite number"
        )

    return checked
