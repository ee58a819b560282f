"""What Prometheus is told of engine cores and requests."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxpaged.config import EngineConfig
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.metrics import EngineMetrics
from jaxpaged.engine.observer import RequestEnd, StepTokens, WatchedRequest
from jaxpaged.engine.output import RequestMetrics
from jaxpaged.engine.stats import EngineStats

CONFIG = EngineConfig(model="tiny", max_model_len=512, num_kv_blocks=64)
PHASES = ("queue", "prefill", "decode", "inference")


class Told:
    """Metrics of two cores, and what they show."""

    def __init__(self):
        self.registry = CollectorRegistry(auto_describe=True)
        self.metrics = EngineMetrics(self.registry, "tiny", CONFIG, num_cores=2)

    def value(self, name: str, engine: int = 0, **labels: str) -> float | None:
        labels = {"model_name": "tiny", "engine": str(engine), **labels}
        return self.registry.get_sample_value(f"jaxpaged:{name}", labels)

    def end(self, reasons=("stop",), *times: float | None, tokens: int = 5, core: int = 0, **params) -> None:
        request = WatchedRequest("r", 7, SamplingParams(**params), core)
        self.metrics.on_added(request)
        self.metrics.on_finished(request, RequestEnd(list(reasons), RequestMetrics(*times, tokens), 3))

    def step(self, core: int = 0, tokens: StepTokens | None = None, **stats) -> None:
        self.metrics.on_step(core, EngineStats(**stats), tokens or StepTokens())


@pytest.fixture
def told() -> Told:
    return Told()


def test_everything_is_there_from_the_start(told):
    """A rate over a counter that appears only with its first event misses that event."""
    for engine in (0, 1):
        for reason in ("stop", "length", "abort", "error"):
            assert told.value("request_success_total", engine, finished_reason=reason) == 0
        for name in ("num_requests_running", "kv_cache_usage_perc", "num_preemptions_total", "prompt_tokens_total"):
            assert told.value(name, engine) == 0
        assert told.value("time_to_first_token_seconds_count", engine) == 0
        for stage in ("schedule", "launch", "sample", "collect", "update"):
            assert told.value("step_seconds_count", engine, stage=stage) == 0


def test_gauges_follow_and_counters_add_up(told):
    told.step(num_running=3, num_waiting=2, num_swapped=1, num_used_blocks=16, num_blocks=64, num_preemptions=1)
    assert told.value("num_requests_running") == 3 and told.value("num_requests_waiting") == 2
    assert told.value("num_requests_swapped") == 1
    assert told.value("kv_cache_usage_perc") == told.value("gpu_cache_usage_perc") == 0.25
    told.step(num_blocks=64, num_preemptions=4, prefix_cache_queries=40, prefix_cache_hits=16)
    told.step(core=1, num_preemptions=7)
    assert told.value("num_requests_running") == told.value("kv_cache_usage_perc") == 0
    assert (told.value("num_preemptions_total"), told.value("num_preemptions_total", 1)) == (4, 7)
    assert (told.value("prefix_cache_queries_total"), told.value("prefix_cache_hits_total")) == (40, 16)


def test_a_core_that_starts_anew_takes_nothing_back(told):
    """B53: counters never decrease."""
    told.step(num_preemptions=5, num_compilations=2, num_padding_tokens=100)
    told.step(num_preemptions=1, num_compilations=0, num_padding_tokens=20)
    told.step(num_preemptions=3, num_compilations=0, num_padding_tokens=30)
    assert told.value("num_preemptions_total") == 8
    assert told.value("compilations_total") == 2
    assert told.value("padding_tokens_total") == 130


def test_a_step_is_observed_once(told):
    stats = {"num_steps": 1, "num_prompt_tokens": 60, "num_generated_tokens": 4}
    told.step(**stats, schedule_seconds=0.001, collect_seconds=0.25)
    told.step(**stats, schedule_seconds=0.001, collect_seconds=0.25)  # nothing has been computed: an abort, say
    assert told.value("iteration_tokens_total_count") == 1 and told.value("iteration_tokens_total_sum") == 64
    assert told.value("step_seconds_sum", stage="collect") == 0.25
    assert told.value("step_seconds_count", stage="schedule") == 1
    assert told.value("step_seconds_count", stage="sample") == 0  # it had none


def test_tokens_of_a_step(told):
    tokens = StepTokens(20, 16, 5, first_token_seconds=[0.5, 1.5], inter_token_seconds=[0.01, 0.02, 0.03])
    told.step(tokens=tokens)
    assert told.value("generation_tokens_total") == 5
    assert told.value("prompt_tokens_total") == 20 and told.value("prompt_tokens_cached_total") == 16
    assert told.value("prompt_tokens_by_source_total", source="local_compute") == 4
    assert told.value("prompt_tokens_by_source_total", source="local_cache_hit") == 16
    assert told.value("time_to_first_token_seconds_count") == 2 and told.value("time_to_first_token_seconds_sum") == 2
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert told.value(f"{name}_count") == 3 and told.value(f"{name}_sum") == pytest.approx(0.06)


def test_a_request_at_its_end(told):
    told.end(["stop"], 9.0, 10.0, 10.5, 11.0, 13.0, 13.5, tokens=5, n=1, max_tokens=9)
    assert told.value("request_success_total", finished_reason="stop") == 1
    sums = {"queue": 0.5, "prefill": 0.5, "decode": 2.0, "inference": 2.5}
    for phase, seconds in sums.items():
        assert told.value(f"request_{phase}_time_seconds_sum") == seconds
    assert told.value("e2e_request_latency_seconds_sum") == 4.5
    assert told.value("request_time_per_output_token_seconds_sum") == 0.5
    assert told.value("request_prompt_tokens_sum") == 7 and told.value("request_generation_tokens_sum") == 5
    assert told.value("request_prefill_kv_computed_tokens_sum") == 4
    assert told.value("request_params_n_sum") == 1 and told.value("request_params_max_tokens_sum") == 9
    assert told.value("e2e_request_latency_seconds_count", 1) == 0


@pytest.mark.parametrize(
    "times, phases",
    [
        ((1.0, None, None, None, None, 2.0), ()),
        ((1.0, 1.4, 1.5, None, None, 2.0), ("queue",)),
        ((1.0, 1.4, 1.5, 1.6, 1.8, 2.0), PHASES),
    ],
)
def test_an_aborted_request_counts_for_what_it_has_gone_through(told, times, phases):
    """B53: histograms count finished and aborted requests alike."""
    told.end(["abort"], *times)
    assert told.value("request_success_total", finished_reason="abort") == 1
    assert told.value("e2e_request_latency_seconds_count") == told.value("request_generation_tokens_count") == 1
    for phase in PHASES:
        assert told.value(f"request_{phase}_time_seconds_count") == (phase in phases)


def test_a_refused_request_was_never_served(told):
    told.end([], 1.0, None, None, None, None, 2.0)
    assert told.value("e2e_request_latency_seconds_count") == told.value("request_params_n_count") == 0


def test_several_samples_are_one_request(told):
    told.end(["length", "stop"], 1.0, 1.0, 1.0, 2.0, 5.0, 5.0, tokens=8, n=2, max_tokens=None)
    assert told.value("request_success_total", finished_reason="length") == 1
    assert told.value("request_params_n_sum") == 2 and told.value("request_params_max_tokens_count") == 0
    assert told.value("request_time_per_output_token_seconds_sum") == 1.0  # three tokens after the first in each


def test_the_text_is_what_prometheus_reads(told):
    told.end(["stop"], 1.0, 1.0, 1.0, 2.0, 5.0, 5.0)
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(told.registry).decode())}
    assert families["jaxpaged:request_success"].type == "counter"
    assert families["jaxpaged:e2e_request_latency_seconds"].type == "histogram"
    (info, other) = families["jaxpaged:cache_config_info"].samples
    assert info.labels["block_size"] == "16" and info.labels["num_gpu_blocks"] == "64" and other.labels["engine"] == "1"
