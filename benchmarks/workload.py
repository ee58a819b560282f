"""The requests of an online benchmark: how long they are, what they ask, and when they arrive."""

from __future__ import annotations

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
) -> list[Asked]:
    """Random requests that stream and want their usage told.

    Args:
      chat: of words, for /v1/chat/completions; else of token ids.
      fields: what every body has besides: the model, how to sample.
    """
    source = random.Random(seed)
    words = _WORDS.split()
    made = []
    for _ in range(count):
        input_len, output_len = inputs.draw(source), outputs.draw(source)
        if chat:
            text = " ".join(source.choice(words) for _ in range(input_len))
            prompt = {"messages": [{"role": "user", "content": text}]}
        else:
            # The middle of the vocabulary: special tokens are at its ends.
            prompt = {"prompt": [source.randrange(vocab_size // 100, vocab_size * 4 // 5) for _ in range(input_len)]}
        body = {
            **prompt,
            "max_tokens": output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        made.append(Asked(msgspec.json.encode(body), output_len))
    return made


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
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
    times = []
    for _ in range(count):
        at += source.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(at)
    scale = count / rate / times[-1]
    return [time * scale for time in times]
