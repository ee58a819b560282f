"""The log: what it says of requests and of the load, and that it never says what they are about."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import time

import pytest

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.observer import RequestEnd, StepTokens, WatchedRequest
from jaxpaged.engine.output import RequestMetrics
from jaxpaged.engine.stats import EngineStats
from server.routes.engine_state import is_no_polling
from server.watch.http_requests import CURRENT, HttpRequest
from server.watch.log_format import add_request_id, configure_logging
from server.watch.request_log import RequestLog
from server.watch.stats_log import StatsLog
from tests.server.conftest import EOS
from tests.waiting import wait_for

SECRETS = ("PROMPTSECRET", "SYSTEMSECRET", "TOOLSECRET", "KEYSECRET", "STOPSECRET", "SCHEMASECRET", "WORDSECRET")


@pytest.fixture
def logged(caplog) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="jaxpaged")
    caplog.handler.addFilter(add_request_id)
    return caplog


def lines(logged: pytest.LogCaptureFixture, logger: str = "jaxpaged.requests") -> list[str]:
    return [f"{r.levelname} {r.getMessage()}" for r in logged.records if r.name == logger]


def test_a_request_is_logged_at_its_start_and_end(start, logged):
    server = start(enable_log_requests=True)
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 9, "temperature": 0.5, "stop": "xyz"}
    server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    wait_for(lambda: len(lines(logged)) == 2)
    began, ended = lines(logged)
    assert began.startswith("INFO request cmpl-mine: POST /v1/completions, model tiny, 3 prompt tokens, ")
    assert "temperature=0.5" in began and "max_tokens=9" in began and " stop" in began and "xyz" not in began
    assert re.fullmatch(
        r"INFO request cmpl-mine: stop after 4 tokens, first token after [\d.]+ s, [\d.]+ s in all", ended
    )
    assert [r.request_id for r in logged.records if r.name == "jaxpaged.requests"] == ["mine", "mine"]


def test_what_is_refused_is_a_line_without_its_words(start, logged):
    """Its id, route or path, status, code and field; only where requests are logged."""
    for enabled in (False, True):
        server = start(enable_log_requests=enabled, api_key=("KEYSECRET",))
        headers = {"X-Request-Id": "no", "Authorization": "Bearer KEYSECRET"}
        server.http.post("/v1/completions", json={"prompt": "PROMPTSECRET", "temperature": -1}, headers=headers)
        for path in ("/v1/models?key=QUERYSECRET", "/v1/PATHSECRET"):
            server.http.get(path, headers={**headers, "Authorization": "Bearer OTHERSECRET"})
        assert bool(lines(logged)) is enabled
    assert lines(logged) == [
        "INFO POST /v1/completions was answered 400 (param temperature)",
        "INFO GET /v1/models was answered 401 (code invalid_api_key)",
        "INFO GET none was answered 401 (code invalid_api_key)",
    ]
    assert [r.request_id for r in logged.records if r.name == "jaxpaged.requests"] == ["no", "no", "no"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "x", "dimensions": "many"}, "dimensions"),
        ("/v1/chat/completions", {"messages": [], "reasoning_effort": 3}, "reasoning_effort"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/v1/completions", {"prompt": "x", "PROMPTSECRET": 1}, None),
    ],
)
def test_the_field_is_named_if_it_is_one_of_the_api(start, logged, path: str, body: dict, param: str | None):
    """Of whichever route; another name may be the user's word."""
    assert start(enable_log_requests=True).post(path, **body).status_code == 400
    (line,) = lines(logged)
    assert line.startswith(f"INFO POST {path} was answered 400") and "SECRET" not in line
    assert line.partition("param ")[2].removesuffix(")") == (param or "")


def test_probes_are_in_the_access_log_only_if_they_fail():
    def told(path: str, status: int = 200) -> bool:
        record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', (), None)
        record.args = ("127.0.0.1:1", "GET", path, "1.1", status)
        return is_no_polling(record)

    assert [path for path in ("/health", "/metrics", "/engine/state", "/v1/models") if told(path)] == ["/v1/models"]
    assert told("/health", 503) and told("/ping", 503)


def test_no_request_is_logged_unless_asked_for(start, logged):
    server = start()
    server.post("/v1/completions", prompt="abc")
    assert lines(logged) == []


def test_what_ends_with_an_error_is_always_logged(start, logged):
    """Once; and not in the words of whatever failed: they may be the user's."""
    server = start()
    grammar = {"regex": "a+"}
    server.play([300 % server.tokenizer.vocab_size, EOS])  # what no "a" spells
    response = server.http.post(
        "/v1/completions",
        json={"prompt": "abc", "structured_outputs": grammar},
        headers={"X-Request-Id": "unlucky"},
    )
    assert response.json()["error"]["code"] == "generation_error"
    wait_for(lambda: len(lines(logged)) == 2)
    line, answer = lines(logged)
    assert line.startswith("WARNING request cmpl-unlucky: error (")
    assert answer == "WARNING POST /v1/completions was answered 500 (code generation_error)"
    assert [r.getMessage() for r in logged.records if r.levelno >= logging.WARNING] == [
        told.removeprefix("WARNING ") for told in (line, answer)
    ]


def test_neither_log_nor_metrics_tell_what_requests_are_about(start, logged):
    """Prompts, system messages, names of tools, keys, stops, schemas: at every level, also when requests fail."""
    server = start(enable_log_requests=True, api_key=("KEYSECRET",))
    headers = {"Authorization": "Bearer KEYSECRET"}
    tool = {"type": "function", "function": {"name": "TOOLSECRET", "parameters": {"type": "object"}}}
    chat = {
        "messages": [
            {"role": "system", "content": "SYSTEMSECRET"},
            {"role": "user", "content": "PROMPTSECRET"},
        ],
        "max_tokens": 8,
    }
    bodies = [
        ("/v1/completions", {"prompt": "PROMPTSECRET", "stop": ["STOPSECRET"], "bad_words": ["WORDSECRET"]}),
        ("/v1/completions", {"prompt": "PROMPTSECRET", "structured_outputs": {"choice": ["SCHEMASECRET"]}}),
        ("/v1/completions", {"prompt": "PROMPTSECRET" * 400}),
        ("/v1/completions", {"prompt": {"wrong": "PROMPTSECRET"}}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "tools": [tool]}),
        ("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": "none"}),
        ("/v1/chat/completions", {**chat, "stream": True}),
    ]
    for path, body in bodies:
        server.http.post(path, json=body, headers=headers)
    server.http.get("/v1/PROMPTSECRET", headers={"Authorization": "Bearer KEYSECRET2"})
    server.settle()
    said = "\n".join(logging.Formatter().format(record) for record in logged.records if record.name != "httpx")
    assert "request cmpl-" in said and "request chatcmpl-" in said
    metrics = server.http.get("/metrics", headers=headers).text
    for secret in SECRETS:
        assert secret not in said and secret not in metrics


def test_a_request_id_cannot_forge_lines(logged):
    log = RequestLog("tiny", enabled=True)
    request = WatchedRequest("a\nINFO request b: stop", 3, SamplingParams())
    log.on_added(request)
    log.on_finished(request, RequestEnd(["stop"], RequestMetrics(0.0)))
    assert len(lines(logged)) == 2 and all("\n" not in line for line in lines(logged))


def test_the_words_of_a_failure_are_left_out(logged):
    log = RequestLog("tiny", enabled=False)
    end = RequestEnd(["error"], RequestMetrics(0.0), detail="the output could not be made: KeyError('SECRET')")
    log.on_finished(WatchedRequest("r", 3, SamplingParams()), end)
    assert lines(logged) == [
        "WARNING request r: error (the output could not be made) after 0 tokens, first token after - s, - s in all"
    ]


def test_lines_have_time_level_and_request_id(monkeypatch):
    stream = io.StringIO()
    logger = logging.getLogger("jaxpaged")
    before = logger.handlers[:], logger.level, logger.propagate
    monkeypatch.setattr("sys.stderr", stream)
    try:
        configure_logging("info")
        configure_logging("info")  # replaces the handler
        logging.getLogger("jaxpaged.engine.core").info("outside")
        token = CURRENT.set(HttpRequest("id-7", {"method": "GET"}))
        logging.getLogger("jaxpaged.server").warning("inside")
        CURRENT.reset(token)
        logging.getLogger("jaxpaged.requests").debug("not told")
    finally:
        logger.handlers[:], logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
    outside, inside = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO    \[-\] outside", outside)
    assert inside.endswith("WARNING [id-7] inside")


def test_load_is_logged_while_there_is_work(logged):
    async def serve() -> None:
        log = StatsLog(seconds=0.02)
        stats = EngineStats(num_steps=1, num_running=2, num_waiting=1, num_used_blocks=16, num_blocks=64)
        log.on_step(0, stats, StepTokens(num_generated_tokens=5))
        log.on_step(1, EngineStats(num_steps=9, prefix_cache_queries=40, prefix_cache_hits=10), StepTokens())
        await said(3)  # the first core is busy still
        log.on_step(0, EngineStats(num_steps=1, num_blocks=64), StepTokens())
        count = len(lines(logged, "jaxpaged.stats"))
        await asyncio.sleep(0.1)
        assert len(lines(logged, "jaxpaged.stats")) == count, "idle, and yet a line"
        log.on_step(0, EngineStats(num_steps=2, num_blocks=64), StepTokens())
        await said(count + 1)
        log.close()

    async def said(count: int) -> None:
        deadline = time.monotonic() + 10
        while len(lines(logged, "jaxpaged.stats")) < count:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)

    asyncio.run(serve())
    first, second, third, *_ = lines(logged, "jaxpaged.stats")
    assert re.fullmatch(
        r"INFO engine 0: prompt 0\.0 tokens/s, generation \d+\.\d tokens/s, 2 running, 1 waiting, "
        r"KV cache 25\.0% used, prefix cache hits -",
        first,
    )
    assert second.startswith("INFO engine 1: ") and second.endswith("prefix cache hits 25.0%")
    assert third.startswith("INFO engine 0: ") and "generation 0.0 tokens/s" in third


def test_load_is_not_logged_where_it_is_disabled(start):
    on, off = start(), start(disable_log_stats=True)
    assert [type(o) for o in on.llm.observers._observers].count(StatsLog) == 1
    assert [type(o) for o in off.llm.observers._observers].count(StatsLog) == 0
