"""Every failure is an error object with a 4xx status, and the server goes on. Case B48, and B54 over HTTP."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


def check(response, status: int, param: str | None = None) -> str:
    """Checks the error object; returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and isinstance(error["message"], str) and error["message"]
    assert "x-request-id" in response.headers
    return error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"",
        b"[]",
        b"null",
        b"3",
        b'"x"',
        b"\xff\xfe",
        b'{"model": "tiny", "prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=range(10),
)
def test_bodies_that_are_no_json_object(live, path, content) -> None:
    check(live.http.post(path, content=content, headers=JSON), 400)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_wrong_content_types(live, content_type) -> None:
    message = check(live.http.post(CHAT, content=b"{}", headers={"Content-Type": content_type}), 415)
    assert content_type in message
    charset = {"Content-Type": "application/json; charset=utf-8"}
    assert live.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=charset).status_code == 200


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ('"temperature": "hot"', "temperature"),
        ('"temperature": true', "temperature"),
        ('"temperature": NaN', "temperature"),
        ('"temperature": Infinity', "temperature"),
        ('"temperature": -1', "temperature"),
        ('"temperature": 1e999', "temperature"),
        ('"top_p": 1.5', "top_p"),
        ('"top_p": "1"', "top_p"),
        ('"top_k": -2', "top_k"),
        ('"top_k": 1.5', "top_k"),
        ('"min_p": 2', "min_p"),
        ('"seed": 1.0', "seed"),
        ('"seed": 99999999999999999999', "seed"),
        ('"max_tokens": true', "max_tokens"),
        ('"max_tokens": -1', "max_tokens"),
        ('"max_tokens": "5"', "max_tokens"),
        ('"max_tokens": 99999999999999999999', "max_tokens"),
        ('"min_tokens": -1', "min_tokens"),
        ('"min_tokens": 9, "max_tokens": 3', "min_tokens"),
        ('"stop": 3', "stop"),
        ('"stop": [""]', "stop"),
        ('"stop": [3]', "stop"),
        ('"stop": ["a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a"]', "stop"),
        ('"stop_token_ids": [-1]', "stop_token_ids"),
        ('"stop_token_ids": ["x"]', "stop_token_ids"),
        ('"stream": "yes"', "stream"),
        ('"stream": true, "stream_options": {"x": 1}', "stream_options"),
        ('"stream": true, "stream_options": []', "stream_options"),
        ('"n": 0', "n"),
        ('"n": true', "n"),
        ('"n": 129', "n"),
        ('"presence_penalty": 3', "presence_penalty"),
        ('"presence_penalty": false', "presence_penalty"),
        ('"logit_bias": {"191222": -100}', "logit_bias"),
        ('"response_format": {"type": "json_schema", "schema": {}}', "response_format"),
        ('"response_format": {"type": "regex", "regex": "("}', "response_format"),
        ('"model": 3', "model"),
        ('"model": ["tiny"]', "model"),
        ('"tempratrue": 1', "tempratrue"),
        ('"{x}": 1', "{x}"),
        ('"request_id": "' + "x" * 300 + '"', "request_id"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_wrong_values_are_refused_by_name(live, path, raw, param) -> None:
    prompt = '"prompt": "x"' if path == COMPLETIONS else '"messages": [{"role": "user", "content": "x"}]'
    message = check(live.http.post(path, content=f"{{{prompt}, {raw}}}".encode(), headers=JSON), 400, param)
    assert param in message


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"early_stopping": 3}, "early_stopping: "),
        ({"stop": ["a", 3]}, "stop: "),
        ({"guided_json": 3}, "guided_json: "),
        ({"structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice.1: "),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"name": "a"}}},
            "unknown field 'respo",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": 3}}},
            "response_format.json_schema.strict: ",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.name is missing",
        ),
    ],
    ids=str,
)
def test_a_fault_is_placed_by_the_bodys_own_keys(live, fields, place) -> None:
    (param,) = fields
    assert check(live.post(COMPLETIONS, prompt="x", **fields), 400, param).startswith(place)


def test_fields_of_the_other_endpoint_are_refused(live) -> None:
    check(live.post(COMPLETIONS, prompt="x", messages=[]), 400, "messages")
    check(live.post(CHAT, messages=[{"role": "user", "content": "x"}], prompt="x"), 400, "prompt")
    check(live.post(COMPLETIONS, prompt="x", top_logprobs=1), 400, "top_logprobs")
    check(live.post(COMPLETIONS, prompt="x", logprobs=21), 400, "logprobs")


def test_missing_fields(live) -> None:
    check(live.post(COMPLETIONS), 400, "prompt")
    check(live.post(CHAT), 400, "messages")


def test_unknown_models_paths_and_methods(live) -> None:
    for stream in (False, True):
        response = live.post(COMPLETIONS, prompt="x", model="gpt-4", stream=stream)
        assert "gpt-4" in check(response, 404, "model")
        assert response.json()["error"]["code"] == "model_not_found"
    check(live.http.get("/v1/nothing"), 404)
    response = live.http.get(CHAT)
    check(response, 405)
    assert response.headers["allow"] == "POST"


def test_too_large_a_body(live) -> None:
    check(live.http.post(COMPLETIONS, content=b" " * (33 << 20), headers=JSON), 413)


def test_the_openai_client_raises_its_own_errors(live) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        live.openai.completions.create(model="tiny", prompt="x", temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as error:
        live.openai.completions.create(model="other", prompt="x")
    assert error.value.code == "model_not_found"


def test_faults_of_our_own_show_no_details(start) -> None:
    server = start()
    server.tokenizer.encode = None  # type: ignore[method-assign]
    for stream in (False, True):
        assert check(server.post(COMPLETIONS, prompt="x", stream=stream), 500) == "internal error"
    assert server.post(COMPLETIONS, prompt=[5]).status_code == 200


def test_a_dead_engine_fails_what_waits_and_what_comes(start, caplog) -> None:
    """B54: promptly, streamed or not; /health says so."""
    server = start()
    server.play([5], delay=0.05)
    with ThreadPoolExecutor(4) as pool:
        body = {"prompt": "x", "max_tokens": 400}
        whole = pool.submit(server.post, COMPLETIONS, **body)
        streamed = pool.submit(server.post, COMPLETIONS, **body, stream=True)
        while len(server.engine.live) < 2 or not all(r.num_output_tokens for r in server.engine.live.values()):
            time.sleep(0.005)
        server.engine.fail_with = RuntimeError("device lost")
        died = time.monotonic()
        assert check(whole.result(), 503) == "the engine has failed"  # what of is for the log only
        assert whole.result().json()["error"]["code"] == "engine_dead"
        *_, last, done, _ = streamed.result().text.split("\n\n")
        assert last.startswith('data: {"error":{') and done == "data: [DONE]" and "device lost" not in last
        assert time.monotonic() - died < 10  # to their end they would take 20
    assert "device lost" in caplog.text
    for response in (
        server.http.get("/health"),
        server.http.get("/engine/state"),
        server.post(COMPLETIONS, prompt="x", stream=True),
        server.post("/tokenize", prompt="x"),
    ):
        assert check(response, 503) == "the engine has failed"
    assert server.http.get("/v1/models").status_code == 200
