"""The requests of an online benchmark: how long they are, what they ask, and when they arrive."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

# A token each in most vocabularies.
_WORDS = "time year people way day man thing woman life child world school state family student group country problem"


@dataclass(frozen=True)
class Lengths:
    """Token counts: `mean * (1 - spread)` to `mean * (1 + spread)`.

    Attributes:
      spread: 0: all the same.
      exponent: of a power law, `density ~ length ** -exponent`: many short ones, few long ones; 0: all as likely.
    """

    mean: int
    spread: float = 0.0
    exponent: float = 0.0

    def draw(self, source: random.Random) -> int:
        """One length, at least 1."""
        low, high = max(1.0, self.mean * (1 - self.spread)), max(1.0, self.mean * (1 + self.spread))
        at, power = source.random(), 1 - self.exponent
        if abs(power) < 1e-9:
            value = low * (high / low) ** at
        else:
            value = (low**power + at * (high**power - low**power)) ** (1 / power)
        return max(1, round(value))


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
      body: as JSON.
      output_len: how many tokens it wants.
    """

    body: bytes
    output_len: int


def requests(
    count: int,
    inputs: Lengths,
    outputs: Lengths,
    *,
    chat: bool,
    vocab_size: int,
    seed: int,
    fields: Mapping[str, Any],
    prefix_len: int = 0,
) -> list[Asked]:
    """Random requests that stream and want their usage told.

    Args:
      chat: of words, for /v1/chat/completions; else of token ids.
      fields: what every body has besides: the model, how to sample.
      prefix_len: words or ids that all prompts begin with; `inputs` are those that follow.
    """
    source = random.Random(seed)
    words = _WORDS.split()
    ids = range(vocab_size // 100, vocab_size * 4 // 5)  # the middle of the vocabulary: special tokens are at its ends
    draw = functools.partial(source.choice, words if chat else ids)
    prefix = [draw() for _ in range(prefix_len)]
    made = []
    for _ in range(count):
        input_len, output_len = inputs.draw(source), outputs.draw(source)
        drawn = [*prefix, *(draw() for _ in range(input_len))]
        if chat:
            prompt: dict[str, Any] = {"messages": [{"role": "user", "content": " ".join(map(str, drawn))}]}
        else:
            prompt = {"prompt": drawn}
        body = {
            **prompt,
            "max_tokens": output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        made.append(Asked(msgspec.json.encode(body), output_len))
    return made


@dataclass(frozen=True)
class Ramp:
    """A rate of requests that grows, or falls, from the first one to the last.

    Attributes:
      strategy: "linear" or "exponential".
      start, end: requests a second.
    """

    strategy: str
    start: float
    end: float

    def at(self, progress: float) -> float:
        """The rate when this part of the requests, 0 to 1, has been sent."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * (self.end / self.start) ** progress


def arrivals(count: int, rate: float | Ramp, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which requests arrive: a Poisson process, or one of gamma-distributed gaps.

    Args:
      rate: requests a second; infinite: all at once.
      burstiness: shape of the gamma distribution. 1: Poisson; less: in bursts; more: more evenly. The times are
        scaled so that the last one is where the rate puts it.
    """
    if rate == float("inf"):
        return [0.0] * count
    source = random.Random(seed)
    at = 0.0
    times, gaps = [], [1 / (rate.at(i / count) if isinstance(rate, Ramp) else rate) for i in range(count)]
    for gap in gaps:
        at += source.gammavariate(burstiness, gap / burstiness)
        times.append(at)
    scale = sum(gaps) / times[-1]
    return [time * scale for time in times]
