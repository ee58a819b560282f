"""What a client saw of its requests: each one's latencies and faults, and figures over all."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from benchmarks.http_client import Reply

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "inter-token latency: between a chunk and the next",
    "e2el": "end to end",
}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def piece(self) -> str | None:
        """The text; None if this is no part of it. That of a completion may be "": a token without text."""
        delta = self.delta
        return self.text if delta is None else delta.content or delta.reasoning_content or None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_DECODER = msgspec.json.Decoder(_Chunk)


@dataclass
class Outcome:
    """One request. Times are in seconds from when it was sent.

    Attributes:
      fault: what was wrong; "" if nothing.
      text: all that was generated.
      arrivals: times at which text came.
      end: time of the stream's end.
    """

    fault: str = ""
    text: str = ""
    finish_reason: str | None = None
    arrivals: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.arrivals[0]

    @property
    def e2el(self) -> float:
        return self.end

    @property
    def tpot(self) -> float:
        """0 if there is one token only."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.completion_tokens - 1)

    @property
    def itl(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.arrivals)]


def outcome(reply: Reply, output_len: int, *, exactly: bool) -> Outcome:
    """What a streamed answer held, and whether it was as it must be.

    Args:
      output_len: tokens asked for.
      exactly: that many must have come; else at most.
    """
    result = Outcome(reply.error)
    if reply.status != 200:
        result.fault = result.fault or f"status {reply.status}: {reply.body[:300].decode(errors='replace')}"
        return result
    try:
        done = _read(reply, result)
    except msgspec.MsgspecError as e:
        result.fault = result.fault or f"not a chunk: {e}"
        return result
    if not result.fault:
        result.fault = _fault(result, output_len, done=done, exactly=exactly)
    return result


def chunk_text(data: bytes) -> str:
    """The text in an event's data."""
    return "".join(choice.piece or "" for choice in _DECODER.decode(data).choices)


def _read(reply: Reply, result: Outcome) -> bool:
    """Fills in what the events say. Returns whether the last one is [DONE]."""
    text: list[str] = []
    done = False
    for now, data in reply.events():
        done = data == b"[DONE]"
        if done:
            result.end = now - reply.sent
            continue
        chunk = _DECODER.decode(data)
        if chunk.error is not None:
            result.fault = result.fault or f"an error in the stream: {chunk.error.message}"
        if chunk.usage is not None:
            result.prompt_tokens, result.completion_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        for choice in chunk.choices:
            result.finish_reason = choice.finish_reason or result.finish_reason
            piece = choice.piece
            if piece is not None:
                text.append(piece)
                result.arrivals.append(now - reply.sent)
    result.text = "".join(text)
    return done


def _fault(result: Outcome, output_len: int, *, done: bool, exactly: bool) -> str:
    if not done:
        return "the stream does not end with [DONE]"
    if not result.arrivals:
        return "nothing was generated"
    if result.finish_reason not in ("length", "stop"):
        return f"finish_reason is {result.finish_reason!r}"
    count = result.completion_tokens
    if count > output_len or (exactly and count != output_len):
        return f"{count} tokens came, {output_len} were asked for"
    return ""


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest values, as numpy does by default."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summary(
    outcomes: Sequence[Outcome],
    seconds: float,
    *,
    metrics: Iterable[str] = METRICS,
    percentiles: Iterable[float] = (99,),
    goals: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Figures over a run, under the names that `vllm bench serve` gives them.

    Args:
      seconds: how long it took.
      metrics: of `METRICS`, those to describe.
      goals: for goodput: milliseconds that a request's metric may take at most; of "itl", its longest.
    """
    good = [outcome for outcome in outcomes if not outcome.fault]
    output_tokens = sum(outcome.completion_tokens for outcome in good)
    input_tokens = sum(outcome.prompt_tokens for outcome in good)
    figures: dict[str, Any] = {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "duration": seconds,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / seconds,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (input_tokens + output_tokens) / seconds,
    }
    if goals:
        figures["request_goodput"] = sum(_meets(outcome, goals) for outcome in good) / seconds
    for metric in metrics:
        figures |= _described(metric, _values(metric, good), percentiles)
    return figures


def _values(metric: str, outcomes: Iterable[Outcome]) -> list[float]:
    if metric == "itl":
        return [gap for outcome in outcomes for gap in outcome.itl]
    if metric == "tpot":
        outcomes = [outcome for outcome in outcomes if outcome.completion_tokens > 1]
    return [getattr(outcome, metric) for outcome in outcomes]


def _described(metric: str, values: list[float], percentiles: Iterable[float]) -> dict[str, float]:
    if not values:
        return {}
    named = {"mean": statistics.fmean(values), "median": statistics.median(values), "std": statistics.pstdev(values)}
    named |= {f"p{percent:g}": percentile(values, percent) for percent in percentiles}
    return {f"{name}_{metric}_ms": 1e3 * value for name, value in named.items()}


def _meets(outcome: Outcome, goals: Mapping[str, float]) -> bool:
    return all(max(_values(metric, [outcome]), default=0.0) * 1e3 <= goal for metric, goal in goals.items())
