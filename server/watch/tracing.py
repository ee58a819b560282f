"""A span a request for an OpenTelemetry collector, with the names of the semantic conventions for generative AI."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.observer import RequestEnd, StepTokens, WatchedRequest
from jaxpaged.engine.stats import EngineStats
from server.watch.http_requests import CURRENT

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN_NAME = "llm_request"
TRACE_HEADERS = ("traceparent", "tracestate")
SECONDS_TO_FLUSH = 5.0  # at the end, for a collector that does not answer


class RequestTracer:
    """Observes requests. A span becomes part of the trace that the client's `traceparent` header names."""

    def __init__(self, exporter: SpanExporter, model_name: str):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model_name = model_name
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxpaged"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxpaged")
        self._extract = TraceContextTextMapPropagator().extract
        self._contexts: dict[WatchedRequest, Any] = {}  # what the span of a live request belongs to

    def on_added(self, request: WatchedRequest) -> None:
        """Notes which trace it belongs to."""
        http = CURRENT.get()
        headers = {} if http is None else {name: http.header(name) for name in TRACE_HEADERS}
        self._contexts[request] = self._extract({name: value for name, value in headers.items() if value})

    def on_step(self, core_index: int, stats: EngineStats, tokens: StepTokens) -> None:
        """Not traced."""

    def on_finished(self, request: WatchedRequest, end: RequestEnd) -> None:
        """Writes the span, from the request's arrival to its end."""
        from opentelemetry.trace import SpanKind, StatusCode

        context = self._contexts.pop(request, None)
        to_wall_clock = time.time() - time.monotonic()
        finished = end.metrics.finished_time or time.monotonic()
        span = self._tracer.start_span(
            SPAN_NAME,
            context=context,
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(end.metrics.arrival_time + to_wall_clock),
            attributes=_attributes(request, end, self._model_name, finished),
        )
        if end.reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end(_nanoseconds(finished + to_wall_clock))

    def close(self, timeout: float = SECONDS_TO_FLUSH) -> None:
        """Sends what waits; gives up after `timeout` seconds."""
        flushing = threading.Thread(target=self._provider.shutdown, name="jaxpaged-traces", daemon=True)
        flushing.start()
        flushing.join(timeout)


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Sends spans to a collector, in protobuf over HTTP. `ServerConfig` has checked that the packages are there."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint)


def _attributes(request: WatchedRequest, end: RequestEnd, model_name: str, finished: float) -> dict[str, Any]:
    params: SamplingParams = request.params
    metrics = end.metrics
    scheduled, first, last = metrics.scheduled_time, metrics.first_token_time, metrics.last_token_time
    attributes = {
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": end.reasons,
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.num_sequences": params.num_samples,
        "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": metrics.num_output_tokens,
        "gen_ai.latency.e2e": finished - metrics.arrival_time,
        "gen_ai.latency.time_in_queue": _between(metrics.queued_time, scheduled),
        "gen_ai.latency.time_to_first_token": _between(metrics.arrival_time, first),
        "gen_ai.latency.time_in_model_prefill": _between(scheduled, first),
        "gen_ai.latency.time_in_model_decode": _between(first, last),
        "gen_ai.latency.time_in_model_inference": _between(scheduled, last),
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
