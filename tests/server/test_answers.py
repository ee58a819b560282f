"""Answers of requests of which something, or nothing, came; long ones; and limits of time and number."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import openai
import pytest

from jaxpaged.core.request import FAILURES, Ending
from jaxpaged.core.step import NONE_ALLOWED, NOT_FINITE
from server.answers import encoded
from tests.server.conftest import LiveServer, wait_for

pytestmark = pytest.mark.usefixtures("frozen_heap")  # times are taken

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.fixture
def failing(live, monkeypatch):
    """Makes samples of some indexes fail, after two tokens, as logits that are NaN do."""

    def fail(*indexes: int, how: int = NOT_FINITE) -> LiveServer:
        add_token = live.engine._add_token

        def token_or_failure(sample, update):
            if sample.index in indexes and sample.num_output_tokens == 2:
                return tuple(FAILURES[how])
            return add_token(sample, update)

        monkeypatch.setattr(live.engine, "_add_token", token_or_failure)
        live.play([5])
        return live

    return fail


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("n", [1, 3])
def test_nothing_came_of_a_request(failing, caplog, path, n) -> None:
    server = failing(*range(n))
    server.engine.delay = 0.02  # so that a stream has begun before it fails
    body = {**PROMPTS[path], "n": n, "max_tokens": 9}
    with caplog.at_level(logging.WARNING):
        response = server.http.post(path, json=body, headers={"X-Request-Id": "the-one"})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (500, "server_error", "generation_error")
    assert "NaN" in error["message"] and "the-one" in caplog.text
    streamed = server.post(path, **body, stream=True)
    *events, done, rest = streamed.text.split("\n\n")
    assert (streamed.status_code, done, rest) == (200, "data: [DONE]", "")
    last = json.loads(events[-1].removeprefix("data: "))["error"]
    assert (last["type"], last["code"]) == ("server_error", "generation_error")
    client = server.openai.with_options(max_retries=0)
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="tiny", prompt="x", max_tokens=9, n=n)
    with pytest.raises(openai.APIError, match="NaN"):
        list(client.completions.create(model="tiny", prompt="x", max_tokens=9, n=n, stream=True))


@pytest.mark.parametrize("path", PROMPTS)
def test_some_choices_failed(failing, path) -> None:
    """The others are what was asked for."""
    server = failing(1)
    body = {**PROMPTS[path], "n": 3, "max_tokens": 4}
    choices = server.post(path, **body).json()["choices"]
    assert [c["finish_reason"] for c in choices] == ["length", "error", "length"]
    reasons = {}
    for event in server.events(path, **body):
        reasons |= {c["index"]: c["finish_reason"] for c in event["choices"] if c["finish_reason"]}
    assert reasons == {0: "length", 1: "error", 2: "length"}


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("failed", [(0,), (0, 1, 2)])
def test_what_failed_is_told_without_details(failing, monkeypatch, path, failed) -> None:
    """They are the words of an exception of ours."""
    monkeypatch.setitem(FAILURES, NOT_FINITE, Ending("error", "the grammar failed: KeyError('SECRET')"))
    server = failing(*failed)
    body = {**PROMPTS[path], "n": 3, "max_tokens": 4}
    told = [server.post(path, **body, stream=stream).text for stream in (False, True)]
    assert all("the grammar failed" in text and "SECRET" not in text for text in told)


@pytest.mark.parametrize("path", PROMPTS)
def test_a_stream_that_fails_midway_is_counted_and_logged_as_what_it_is(failing, caplog, path) -> None:
    """Though its status was sent when all was well."""
    server = failing(0)
    server.engine.delay = 0.02

    def counted() -> float:
        labels = f'{{handler="{path}",method="POST",status="500"}}'
        text = server.http.get("/metrics").text
        return float((re.search(rf"^http_requests_total{re.escape(labels)} (.+)$", text, re.M) or ["", "0"])[1])

    before = counted()
    with caplog.at_level(logging.WARNING, "jaxpaged.requests"):
        assert server.post(path, **PROMPTS[path], max_tokens=9, stream=True).status_code == 200
        wait_for(lambda: counted() == before + 1)
    assert f"POST {path} was answered 500 (code generation_error)" in caplog.text


@pytest.mark.parametrize("path", PROMPTS)
def test_a_request_that_leaves_itself_no_token(failing, path) -> None:
    """The client's own fault: trying again would not help."""
    response = failing(0, how=NONE_ALLOWED).post(path, **PROMPTS[path], max_tokens=9)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "generation_error")


def test_all_prompts_of_a_batch_count(failing) -> None:
    server = failing(0)
    response = server.post(COMPLETIONS, prompt=["a", "b"], n=2, max_tokens=4)
    assert [c["finish_reason"] for c in response.json()["choices"]] == ["error", "length"] * 2
    assert server.post(COMPLETIONS, prompt=["a", "b"], max_tokens=4).status_code == 500


@pytest.mark.parametrize("step", ["prepare", "answer"])
@pytest.mark.parametrize("path", PROMPTS)
def test_a_fault_in_one_request_is_that_requests_alone(live, monkeypatch, caplog, path, step) -> None:
    """S21: while it is prepared or its answer is made."""
    live.play(live.engine.script, delay=0.03)
    text = "undisturbed " * 5
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(live.post, COMPLETIONS, prompt=text, max_tokens=200)
        wait_for(lambda: live.engine.live)
        if step == "prepare":
            monkeypatch.setattr(live.tokenizer, "encode", None)
        else:
            monkeypatch.setattr("server.completion_choices.CompletionChoices.pieces", None)
            monkeypatch.setattr("server.chat.choices.ChatChoices.whole", None)
        for _ in range(3):
            response = live.post(path, **PROMPTS[path], max_tokens=2)
            assert response.status_code == 500
            assert response.json()["error"]["message"] == "internal error" and "None" not in response.text
        monkeypatch.undo()
        assert neighbour.result().json()["choices"][0]["text"] == text
    assert "Traceback" in caplog.text


# Long ones.


def test_json_in_slices_is_the_same_json() -> None:
    answer = {
        "id": "x",
        "choices": [
            {"index": i, "text": "é\n", "logprobs": {"tokens": ["a"] * n, "top": [{"a": -1.0}] * n}, "none": None}
            for i, n in enumerate((0, 1, 255, 256, 257, 1000))
        ],
        "prompt_logprobs": [None, *({"5": {"rank": 1, "decoded_token": "\u2028"}} for _ in range(700))],
        "usage": {"prompt_tokens_details": {"cached_tokens": 0}},
        "empty": [],
    }
    assert json.loads(encoded(answer)) == answer
    assert msgspec.json.encode(msgspec.json.decode(encoded(answer))) == msgspec.json.encode(answer)


LONG_ANSWERS = [
    {"prompt_logprobs": 20},
    {"echo": True, "logprobs": 20},
    {"echo": True, "logprobs": 20, "stream": True},
    {"n": 30, "logprobs": 20},
]


@pytest.mark.parametrize("options", LONG_ANSWERS, ids=map(str, range(4)))
def test_a_long_answer_holds_nobody_up(start, options) -> None:
    server = start(engine_options={"max_model_len": 20_000, "num_blocks": 2000})
    server.play([5], tops=list(range(20)), tokens_per_step=100)
    waits, stop = [], threading.Event()

    def probe() -> None:
        while not stop.is_set():
            begin = time.process_time()  # other work on the machine does not count
            server.http.get("/health")
            waits.append(time.process_time() - begin)
            stop.wait(0.005)

    thread = threading.Thread(target=probe)
    thread.start()
    response = server.post(COMPLETIONS, prompt=[7] * 8_000, max_tokens=100, **options)
    stop.set()
    thread.join()
    assert response.status_code == 200 and len(response.content) > 500_000
    assert max(waits) < 0.5, sorted(waits)[-5:]


# Limits.


@pytest.mark.parametrize("path", PROMPTS)
def test_no_request_takes_longer_than_the_server_allows(start, path) -> None:
    server = start(request_timeout=0.2)
    server.play([5], delay=0.05)
    for own, least in ((None, 0.2), (5, 0.2), (0.05, 0.05)):
        begin = time.monotonic()
        (choice,) = server.post(path, **PROMPTS[path], max_tokens=400, timeout=own).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "timeout")
        assert least <= time.monotonic() - begin < 10  # to its end it would take 20
    *_, last = server.events(path, **PROMPTS[path], max_tokens=400)
    assert last["choices"][0]["finish_reason"] == "abort"
    assert server.post(path, **PROMPTS[path], max_tokens=3).json()["choices"][0]["finish_reason"] == "length"


def test_only_so_many_requests_at_once(start) -> None:
    """More are told to come again; probes are always answered."""
    server = start(limit_concurrency=3)
    server.play([5], delay=0.05)
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(server.post, COMPLETIONS, prompt="x", max_tokens=60, stream=bool(i)) for i in range(3)]
        wait_for(lambda: len(server.engine.live) == 3)
        for response in (server.post(COMPLETIONS, prompt="x"), server.http.get("/v1/models")):
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1" and response.json()["error"]["code"] == "too_many_requests"
        assert server.http.get("/health").status_code == 200
        assert all(r.result().status_code == 200 for r in running)
    assert server.post(COMPLETIONS, prompt="x", max_tokens=2).status_code == 200
