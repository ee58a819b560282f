"""What Prometheus is told of an engine: vLLM's names and meanings, but for the prefix.

Per step: what the core counted since the last one, and the times of the tokens that it brought. Per request, once, at
its end: everything named `request_...`, and `e2e_request_latency_seconds`. A request ends with the reason of its worst
sample: "stop", "length", "abort" (its client left, or its time was over), "error". All of these are observed; but of
the phases of its life only those that it has gone through: one that was aborted in the queue has no queue time, one
that got no token has no prefill time. So `e2e_request_latency_seconds_count` is the sum of `request_success_total`. A
request that its core refused was never served, and is in none of them; the server counts its answer.

Times between the engine and its tokens are the engine's own, of its steps: the queue, prefill, decode, inference, and
from token to token. Those of the client, to the first token and to the end, are from the arrival in the front to when
the output is there.

Where vLLM's mean something else, on purpose:
- A request of several samples is one request, with the tokens of all; there each sample is observed as a request.
- Requests that were aborted are observed; there they are in none.
- `iteration_tokens_total` counts the tokens that a step computed, not those that reached the front.
- A request of one token has no `request_time_per_output_token_seconds`; there it is 0.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge

from jaxpaged.config import EngineConfig
from jaxpaged.engine.histogram import Histogram, Series
from jaxpaged.engine.observer import RequestEnd, StepTokens, WatchedRequest
from jaxpaged.engine.stats import EngineStats
from jaxpaged.engine.step_meter import StepMeter

PREFIX = "jaxpaged:"
LABELS = ("model_name", "engine")
REASONS = ("stop", "length", "abort", "error")
SOURCES = ("local_compute", "local_cache_hit")

# (name, field of EngineStats, help)
_GAUGES = (
    ("num_requests_running", "num_running", "Samples of requests that are being computed."),
    ("num_requests_waiting", "num_waiting", "Samples of requests that wait to be computed."),
    ("num_requests_swapped", "num_swapped", "Waiting samples whose KV blocks are in host memory."),
    ("kv_cache_usage_perc", "kv_cache_usage", "Share of the KV blocks that live requests hold; 1 is all."),
    ("gpu_cache_usage_perc", "kv_cache_usage", "As kv_cache_usage_perc, which is its newer name."),
    ("num_programs", "num_programs", "Compiled programs."),
)
_COUNTERS = (
    ("num_preemptions", "num_preemptions", "How often a running request lost its KV blocks to another."),
    ("prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("compilations", "num_compilations", "Programs compiled while serving; should stay 0."),
    ("padding_tokens", "num_padding_tokens", "Tokens computed only because steps have fixed shapes."),
)

_TO_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_OF_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_OF_REQUESTS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_OF_STAGES = (
    0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2,
)  # fmt: skip
_TOKENS_OF_STEPS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SAMPLES = (1, 2, 5, 10, 20)

# Times: (name, bounds, help)
_TIMES = (
    ("e2e_request_latency_seconds", _OF_REQUESTS, "From a request's arrival to its end."),
    ("request_queue_time_seconds", _OF_REQUESTS, "From when the engine took a request in to its first part in a step."),
    ("request_prefill_time_seconds", _OF_REQUESTS, "From a request's first part in a step to its first token."),
    ("request_decode_time_seconds", _OF_REQUESTS, "From a request's first token to its last."),
    ("request_inference_time_seconds", _OF_REQUESTS, "From a request's first part in a step to its last token."),
    ("request_time_per_output_token_seconds", _OF_TOKENS, "A request's mean time between tokens."),
)


class EngineMetrics:
    """Observes an AsyncLLM for Prometheus.

    Args:
      registry: where the metrics are to be found; each server has its own.
      model_name: value of that label.
      config: the engine's options.
      num_cores: engine cores, each with its own value of the label "engine".
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, config: EngineConfig, num_cores: int = 1):
        self._families = _Families(registry, config.max_model_len or 1)
        self._model_name = model_name
        self._cores: list[_CoreMetrics] = []
        for index in range(num_cores):
            self._core(index)
            _tell_cache_config(self._families.cache_config, config, index)

    def on_added(self, request: WatchedRequest) -> None:
        """Nothing yet: a request is observed at its end."""

    def on_step(self, core_index: int, stats: EngineStats, tokens: StepTokens) -> None:
        """Takes in what a core counted, and its step's tokens."""
        self._core(core_index).take_step(stats, tokens)

    def on_finished(self, request: WatchedRequest, end: RequestEnd) -> None:
        """Observes a request."""
        if end.reasons:
            self._core(request.core_index).take_request(request, end)

    def _core(self, index: int) -> _CoreMetrics:
        while len(self._cores) <= index:
            self._cores.append(_CoreMetrics(self._families, (self._model_name, str(len(self._cores)))))
        return self._cores[index]


class _Families:
    """Every metric once, by its name without the prefix."""

    def __init__(self, registry: CollectorRegistry, max_model_len: int):
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, [*LABELS, *labels], registry=registry)

        def histogram(names: str, text: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(registry, [PREFIX + name for name in names.split()], text, (*LABELS, *labels), bounds)

        lengths = _one_two_five(max_model_len)
        self.gauges = [(field, Gauge(PREFIX + name, text, LABELS, registry=registry)) for name, field, text in _GAUGES]
        self.counters = [(field, counter(name, text)) for name, field, text in _COUNTERS]
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests whose prompt has been computed.")
        self.prompt_tokens_cached = counter("prompt_tokens_cached", "Those of them found in the prefix cache.")
        self.prompt_tokens_by_source = counter(
            "prompt_tokens_by_source", "The same, by where they come from.", "source"
        )
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.request_success = counter("request_success", "Requests that have ended, by how.", "finished_reason")
        self.iteration_tokens = histogram(
            "iteration_tokens_total", "Tokens of a step: of prompts, and generated.", _TOKENS_OF_STEPS
        )
        self.step_seconds = histogram("step_seconds", "Time of each stage of a step.", _OF_STAGES, "stage")
        self.to_first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _TO_FIRST_TOKEN
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds time_per_output_token_seconds", "From one token to the next.", _OF_TOKENS
        )
        self.times = {name: histogram(name, text, bounds) for name, bounds, text in _TIMES}
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Length of a request's prompt.", lengths)
        self.request_computed_tokens = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens not found in the prefix cache.", lengths
        )
        self.request_generation_tokens = histogram("request_generation_tokens", "Tokens of a request.", lengths)
        self.request_max_tokens = histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest sample.", lengths
        )
        self.params_n = histogram("request_params_n", "What requests ask for as n.", _SAMPLES)
        self.params_max_tokens = histogram("request_params_max_tokens", "Their max_tokens.", lengths)
        self.cache_config = Gauge(
            PREFIX + "cache_config_info", "Options of the KV cache, as labels.", _CACHE_LABELS, registry=registry
        )


class _CoreMetrics:
    """The series of one core, found once."""

    def __init__(self, families: _Families, labels: tuple[str, str]):
        def series(histogram: Histogram, *more: str) -> Series:
            return histogram.labels(*labels, *more)

        self._gauges = [(field, family.labels(*labels)) for field, family in families.gauges]
        self._counters = [(field, family.labels(*labels)) for field, family in families.counters]
        self._prompt_tokens = families.prompt_tokens.labels(*labels)
        self._prompt_tokens_cached = families.prompt_tokens_cached.labels(*labels)
        self._by_source = [families.prompt_tokens_by_source.labels(*labels, source) for source in SOURCES]
        self._generation_tokens = families.generation_tokens.labels(*labels)
        self._success = {reason: families.request_success.labels(*labels, reason) for reason in REASONS}
        self._iteration_tokens = series(families.iteration_tokens)
        self._stages = [(f"{stage}_seconds", series(families.step_seconds, stage)) for stage in StepMeter.STAGES]
        self._to_first_token, self._inter_token = series(families.to_first_token), series(families.inter_token)
        self._times = {name: series(family) for name, family in families.times.items()}
        self._prompt_lengths = series(families.request_prompt_tokens)
        self._computed = series(families.request_computed_tokens)
        self._output_lengths = series(families.request_generation_tokens)
        self._longest_outputs = series(families.request_max_tokens)
        self._params_n, self._params_max_tokens = series(families.params_n), series(families.params_max_tokens)
        self._last = EngineStats()

    def take_step(self, stats: EngineStats, tokens: StepTokens) -> None:
        for field, gauge in self._gauges:
            gauge.set(getattr(stats, field))
        for field, counter in self._counters:
            if grown := self._grown(field, stats):
                counter.inc(grown)
        num_tokens = self._grown("num_prompt_tokens", stats) + self._grown("num_generated_tokens", stats)
        if num_tokens:
            self._iteration_tokens.observe(num_tokens)
        if num_tokens or self._grown("num_steps", stats):
            for field, stage in self._stages:
                if seconds := getattr(stats, field):
                    stage.observe(seconds)
        self._last = stats
        self._take_tokens(tokens)

    def _take_tokens(self, tokens: StepTokens) -> None:
        self._generation_tokens.inc(tokens.num_generated_tokens)
        self._inter_token.observe_all(tokens.inter_token_seconds)
        self._to_first_token.observe_all(tokens.first_token_seconds)
        if tokens.num_prompt_tokens:
            self._prompt_tokens.inc(tokens.num_prompt_tokens)
            self._prompt_tokens_cached.inc(tokens.num_cached_tokens)
            computed, cached = self._by_source
            computed.inc(tokens.num_prompt_tokens - tokens.num_cached_tokens)
            cached.inc(tokens.num_cached_tokens)

    def _grown(self, field: str, stats: EngineStats) -> int:
        """By how much a counter has grown. One that is smaller than before belongs to a core that has started anew."""
        now, before = getattr(stats, field), getattr(self._last, field)
        return now - before if now >= before else now

    def take_request(self, request: WatchedRequest, end: RequestEnd) -> None:
        metrics, params, times = end.metrics, request.params, self._times
        self._success[end.reason].inc()
        self._prompt_lengths.observe(request.num_prompt_tokens)
        self._computed.observe(request.num_prompt_tokens - end.num_cached_tokens)
        self._output_lengths.observe(metrics.num_output_tokens)
        self._longest_outputs.observe(metrics.num_longest_tokens)
        self._params_n.observe(params.n)
        if params.max_tokens is not None:
            self._params_max_tokens.observe(params.max_tokens)
        finished = metrics.finished_time or time.monotonic()
        times["e2e_request_latency_seconds"].observe(finished - metrics.arrival_time)
        scheduled, first, last = metrics.scheduled_time, metrics.first_token_time, metrics.last_token_time
        if scheduled is None or metrics.queued_time is None:
            return
        times["request_queue_time_seconds"].observe(scheduled - metrics.queued_time)
        if first is None or last is None:
            return
        times["request_prefill_time_seconds"].observe(first - scheduled)
        times["request_decode_time_seconds"].observe(last - first)
        times["request_inference_time_seconds"].observe(last - scheduled)
        more = metrics.num_output_tokens / params.num_samples - 1
        if more > 0:
            times["request_time_per_output_token_seconds"].observe((last - first) / more)


_CACHE_LABELS = (
    "block_size", "cache_dtype", "enable_prefix_caching", "engine", "gpu_memory_utilization", "num_gpu_blocks",
    "swap_space",
)  # fmt: skip


def _tell_cache_config(gauge: Gauge, config: EngineConfig, index: int) -> None:
    gauge.labels(
        block_size=config.block_size,
        cache_dtype=config.kv_cache_dtype,
        enable_prefix_caching=config.enable_prefix_caching,
        engine=index,
        gpu_memory_utilization=config.gpu_memory_utilization,
        num_gpu_blocks=config.num_kv_blocks,
        swap_space=config.swap_space,
    ).set(1)


def _one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    bounds = [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)]
    return tuple(bound for bound in bounds if bound <= most)
