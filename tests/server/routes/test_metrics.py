"""GET /metrics and /load over a scripted engine."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import EOS, LiveServer
from tests.server.raw_http import connect, head
from tests.waiting import wait_for

KEY = "a-secret-key"
Shown = dict[tuple[str, frozenset[tuple[str, str]]], float]


def shown(server: LiveServer) -> Shown:
    """Every sample, by name and labels."""
    response = server.http.get("/metrics", headers={"Authorization": f"Bearer {KEY}"})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = text_string_to_metric_families(response.text)
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def value(samples: Shown, name: str, **labels: str) -> float | None:
    """The sum over all series of a metric that have these labels; None if there is none."""
    found = [v for (n, have), v in samples.items() if n == name and labels.items() <= dict(have).items()]
    return sum(found) if found else None


def counters(samples: Shown) -> Shown:
    return {key: v for key, v in samples.items() if key[0].endswith(("_total", "_count", "_sum", "_bucket"))}


def leave_a_stream(server: LiveServer, **body: Any) -> None:
    """Reads the start of a stream, and goes."""
    with server.http.stream("POST", "/v1/completions", json={"stream": True, "max_tokens": 400, **body}) as response:
        next(response.iter_lines())


def test_three_finished_two_aborted_one_rejected_one_preempted(start):
    """B53."""
    server = start(engine_options={"delay": 0.002})
    engine, seen = server.engine, [shown(server)]

    def note() -> None:
        seen.append(shown(server))

    for body in ({"prompt": "abc"}, {"prompt": "abcd"}, {"prompt": "abcdef", "max_tokens": 2}):  # stop, stop, length
        assert server.post("/v1/completions", **body).status_code == 200
        note()
    server.play([7])  # without an end
    for _ in range(2):
        leave_a_stream(server, prompt="abc")
        note()
    server.settle()
    engine.queue_limit = 0
    assert server.post("/v1/completions", prompt="abc").status_code == 503
    engine.queue_limit = None
    engine.counts["num_preemptions"] = 1
    assert server.post("/v1/chat/completions", messages=[]).status_code == 400
    server.play([7, EOS])
    assert server.post("/v1/completions", prompt="abc").status_code == 200  # one more step, which tells of it
    note()
    last = seen[-1]
    for reason, count in {"stop": 3, "length": 1, "abort": 2, "error": 0}.items():
        assert value(last, "jaxpaged:request_success_total", finished_reason=reason) == count
    assert value(last, "jaxpaged:num_preemptions_total") == 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(last, f"jaxpaged:{name}") == 0
    for name in (
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_n",
    ):
        assert value(last, f"jaxpaged:{name}_count") == 6  # finished and aborted; the rejected one was never served
    assert value(last, "jaxpaged:time_to_first_token_seconds_count") == 6
    for phase in ("queue", "prefill", "decode", "inference"):
        assert value(last, f"jaxpaged:request_{phase}_time_seconds_count") == 6
    for earlier, later in itertools.pairwise(seen):
        assert all(later[key] >= v for key, v in counters(earlier).items()), "a counter went down"
    assert value(last, "http_requests_total", handler="/v1/completions", status="200") == 6
    assert value(last, "http_requests_total", handler="/v1/completions", status="503") == 1
    assert value(last, "http_requests_total", handler="/v1/chat/completions", status="400") == 1


def test_tokens_add_up(start):
    server = start()
    for prompt in ("abc", "abcdefgh"):
        assert server.post("/v1/completions", prompt=prompt, n=2).status_code == 200
    samples = shown(server)
    assert value(samples, "jaxpaged:prompt_tokens_total") == 3 + 8
    assert value(samples, "jaxpaged:generation_tokens_total") == 2 * (4 + 9)  # the prompt again and EOS, twice
    assert value(samples, "jaxpaged:request_generation_tokens_sum") == 2 * (4 + 9)
    assert value(samples, "jaxpaged:request_max_num_generation_tokens_sum") == 4 + 9
    assert value(samples, "jaxpaged:prompt_tokens_cached_total") == 2 + 4
    assert value(samples, "jaxpaged:prompt_tokens_by_source_total") == 11
    assert value(samples, "jaxpaged:time_to_first_token_seconds_count") == 2  # of requests
    assert value(samples, "jaxpaged:inter_token_latency_seconds_count") == 2 * (3 + 8)  # of each sample, but its first


def test_gauges_are_right_while_it_runs_and_after_an_abort(start):
    server = start()
    server.play([7], delay=0.02)
    body = {"prompt": "a" * 40, "stream": True, "max_tokens": 400}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # to be kept: it closes the connection when it goes
        next(lines)
        samples = shown(server)
        assert value(samples, "jaxpaged:num_requests_running") == 1
        assert value(samples, "jaxpaged:kv_cache_usage_perc") == 3 / 64
        assert server.http.get("/load").json() == {"server_load": 1}
    server.settle()
    wait_for(lambda: value(shown(server), "jaxpaged:num_requests_running") == 0)
    assert value(shown(server), "jaxpaged:kv_cache_usage_perc") == 0
    wait_for(lambda: server.http.get("/load").json() == {"server_load": 0})


def test_load_counts_generation_only(live):
    live.play([7], delay=0.02)
    threads = [threading.Thread(target=live.post, args=("/v1/completions",), kwargs={"prompt": "a", "max_tokens": 400})
               for _ in range(3)]  # fmt: skip
    for thread in threads:
        thread.start()
    wait_for(lambda: live.http.get("/load").json() == {"server_load": 3})
    with connect(live) as sock:
        sock.sendall(head("POST", "/tokenize", "Content-Length: 100"))  # it waits for its body
        for _ in range(5):
            assert live.http.get("/load").json() == {"server_load": 3}
    live.play([EOS])
    for thread in threads:
        thread.join()
    wait_for(lambda: live.http.get("/load").json() == {"server_load": 0})


def test_routes_are_told_by_their_templates(start):
    """A client cannot make up series: neither with paths nor with methods."""
    server = start(root_path="/api")
    for path in (
        "/v1/models/tiny",
        "/api/v1/models/alias",
        "/v1/models/nobody",
        "/no/such/path",
        "/another",
        "/health",
    ):
        server.http.get(path)
    server.http.head("/health")
    server.http.request("PROPFIND", "/health")
    server.http.get("/health", headers={"X-Request-Id": "é".encode("latin-1")})
    samples = shown(server)
    handlers = {dict(labels)["handler"] for (name, labels) in samples if name == "http_requests_total"}
    assert handlers == {"/v1/models/{name:path}", "/health", "none"}
    methods = {dict(labels)["method"] for (name, labels) in samples if name == "http_requests_total"}
    assert methods == {"GET", "HEAD", "other"}
    assert value(samples, "http_requests_total", handler="/v1/models/{name:path}", status="200") == 2
    assert value(samples, "http_requests_total", handler="/v1/models/{name:path}", status="404") == 1
    assert value(samples, "http_requests_total", handler="none", status="404") == 2
    assert value(samples, "http_requests_total", handler="none", status="400") == 1
    assert value(samples, "http_request_duration_seconds_count", handler="/health", method="GET") == 1


def test_metrics_need_the_key_and_count_who_has_none(start):
    server = start(api_key=(KEY,))
    assert server.http.get("/metrics").status_code == 401
    assert server.http.get("/load").status_code == 401
    assert value(shown(server), "http_requests_total", handler="none", status="401") == 2


def test_a_dead_engine_is_told_of(start):
    server = start()
    assert value(shown(server), "jaxpaged:healthy") == 1
    server.play([7], fail_with=RuntimeError("the device is gone"))
    assert server.post("/v1/completions", prompt="abc").status_code >= 500
    samples = shown(server)
    assert value(samples, "jaxpaged:healthy") == 0
    assert value(samples, "jaxpaged:request_success_total", finished_reason="error") == 1


def test_servers_share_nothing(start):
    first, second = start(), start()
    first.post("/v1/completions", prompt="abc")
    assert value(shown(first), "jaxpaged:generation_tokens_total") == 4
    assert value(shown(second), "jaxpaged:generation_tokens_total") == 0


@pytest.mark.parametrize("name", ["process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"])
def test_the_process_is_measured(live, name):
    assert value(shown(live), name)


def test_an_observer_that_fails_stops_nothing(start):
    """B53: a metrics error never stops the engine."""

    class Broken:
        def on_added(self, request):
            raise KeyError("added")

        def on_step(self, core_index, stats, tokens):
            raise KeyError("step")

        def on_finished(self, request, end):
            raise KeyError("finished")

    server = start()
    server.llm.observers.add(Broken())
    for _ in range(2):
        assert server.post("/v1/completions", prompt="abc").json()["choices"][0]["text"] == "abc"
    assert value(shown(server), "jaxpaged:request_success_total", finished_reason="stop") == 2
    assert server.http.get("/health").status_code == 200


def test_prompts_without_tokens_count(start):
    """Of embeddings, and where only the prompt is scored."""
    server = start()
    assert server.post("/v1/completions", prompt="abcdef", max_tokens=0, echo=True, logprobs=1).status_code == 200
    scored = shown(server)
    assert value(scored, "jaxpaged:prompt_tokens_total") == 6
    assert value(scored, "jaxpaged:generation_tokens_total") == 0
    assert value(scored, "jaxpaged:time_to_first_token_seconds_count") == 0
    assert value(scored, "jaxpaged:request_success_total", finished_reason="length") == 1
    assert value(scored, "jaxpaged:request_queue_time_seconds_count") == 1
    assert value(scored, "jaxpaged:request_prefill_time_seconds_count") == 0
