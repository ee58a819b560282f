"""Spans of requests, as an OpenTelemetry collector gets them."""

from __future__ import annotations

import http.server
import importlib.util
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.observer import RequestEnd, WatchedRequest
from jaxpaged.engine.output import RequestMetrics
from jaxpaged.errors import ConfigError
from server.config import ServerConfig
from server.watch.tracing import RequestTracer, otlp_exporter
from tests.waiting import wait_for

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP collector on loopback.

    Attributes:
      spans: what has come.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        spans = self.spans

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                request = ExportTraceServiceRequest.FromString(body)
                spans.extend(s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def attributes(span: Span) -> dict[str, object]:
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        found[attribute.key] = getattr(attribute.value, kind)
    return found


def test_a_request_is_a_span_of_its_clients_trace(start, collector):
    server = start(otlp_traces_endpoint=collector.url)
    before = time.time_ns()
    response = server.http.post(
        "/v1/completions",
        json={"prompt": "abc", "max_tokens": 9, "temperature": 0.5},
        headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"},
    )
    assert response.status_code == 200
    server.stop()  # sends what waits
    (span,) = collector.spans
    assert span.name == "llm_request" and span.kind == Span.SPAN_KIND_SERVER
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert before - 10**7 <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns() + 10**7
    told = attributes(span)
    assert told["gen_ai.request.id"] == "cmpl-mine" and told["gen_ai.response.model"] == "tiny"
    assert (told["gen_ai.usage.prompt_tokens"], told["gen_ai.usage.completion_tokens"]) == (3, 4)
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.max_tokens"]) == (0.5, 9)
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"] < 60
    phases = ("queue", "model_prefill", "model_decode", "model_inference")
    assert all(told[f"gen_ai.latency.time_in_{phase}"] >= 0 for phase in phases)
    assert not any("abc" in str(value) for value in told.values())


def test_without_a_parent_or_with_a_broken_one_a_trace_begins(start, collector):
    server = start(otlp_traces_endpoint=collector.url)
    for headers in ({}, {"traceparent": "no such thing"}):
        assert server.http.post("/v1/completions", json={"prompt": "abc"}, headers=headers).status_code == 200
    server.stop()
    assert len({span.trace_id for span in collector.spans}) == 2
    assert all(span.parent_span_id == b"" for span in collector.spans)


def test_failed_and_aborted_requests_have_spans(collector):
    tracer = RequestTracer(otlp_exporter(collector.url), "tiny")
    for reason in ("error", "abort"):
        request = WatchedRequest(reason, 3, SamplingParams())
        tracer.on_added(request)
        tracer.on_finished(request, RequestEnd([reason], RequestMetrics(time.monotonic())))
    tracer.close()
    failed, aborted = collector.spans
    assert failed.status.code == Status.STATUS_CODE_ERROR and aborted.status.code == Status.STATUS_CODE_UNSET
    assert "gen_ai.latency.time_in_queue" not in attributes(aborted)
    assert tracer._contexts == {}


def test_a_collector_that_does_not_answer_is_not_waited_for():
    exporter = otlp_exporter("http://127.0.0.1:9/v1/traces")
    tracer = RequestTracer(exporter, "tiny")
    request = WatchedRequest("r", 3, SamplingParams())
    tracer.on_finished(request, RequestEnd(["stop"], RequestMetrics(time.monotonic())))
    started = time.monotonic()
    tracer.close(timeout=0.2)
    assert time.monotonic() - started < 5  # the exporter by itself tries for longer


def test_missing_packages_are_told_by_the_flag(monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    with pytest.raises(ConfigError, match=r"jaxpaged\[otlp\]"):
        ServerConfig(otlp_traces_endpoint="http://localhost:4318/v1/traces")
    ServerConfig()


def test_nothing_of_it_is_imported_when_it_is_off():
    heavy = ("opentelemetry.sdk", "opentelemetry.exporter")
    code = f"import sys, server.watch.telemetry; sys.exit(any(m.startswith({heavy}) for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_live_request_that_the_server_forgets_leaves_no_context(start, collector):
    server = start(otlp_traces_endpoint=collector.url)
    server.play([7], delay=0.005)
    body = {"prompt": "abc", "stream": True, "max_tokens": 400}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        (tracer,) = [o for o in server.llm.observers._observers if isinstance(o, RequestTracer)]
        assert len(tracer._contexts) == 1
    wait_for(lambda: not tracer._contexts)
