"""The small routes and request ids."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest

import jaxpaged

GENERATING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/embeddings": {"input": "x"},
}


def test_models(live) -> None:
    cards = live.openai.models.list().data
    assert [card.id for card in cards] == ["tiny", "alias"]
    card = live.http.get("/v1/models/alias").json()
    assert (card["object"], card["owned_by"], card["max_model_len"]) == ("model", "jaxpaged", 512)
    assert live.http.get("/v1/models/none").json()["error"]["code"] == "model_not_found"


def test_probes(live) -> None:
    assert live.http.get("/health").status_code == 200
    assert live.http.get("/ping").status_code == live.http.post("/ping").status_code == 200
    assert live.http.get("/version").json() == {"version": jaxpaged.__version__}


def test_request_ids_are_echoed_or_made(live) -> None:
    assert live.http.get("/health", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    made = {live.http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    assert live.post("/v1/completions", prompt="x", request_id="theirs").json()["id"] == "cmpl-theirs"
    assert live.http.get("/health", headers={"X-Request-Id": "x" * 300}).status_code == 400


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("request_id", ["a\nINFO fake", "a\n", "\x1b[31m", "\u2028", "é", "x" * 257])
def test_request_ids_in_bodies_are_as_those_in_headers(live, path, request_id) -> None:
    refused = live.post(path, **GENERATING[path], request_id=request_id)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "request_id"


@pytest.mark.parametrize("path", GENERATING)
def test_answers_carry_the_first_name(live, path) -> None:
    """Whichever name was asked for."""
    for model in ("tiny", "alias", None):
        body = {**GENERATING[path], "model": model}
        assert live.post(path, **body).json()["model"] == "tiny"
        if path != "/v1/embeddings":
            assert {event["model"] for event in live.events(path, **body)} == {"tiny"}


def test_the_schema_names_every_field(live) -> None:
    schema = live.http.get("/openapi.json").json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "max_completion_tokens", "top_logprobs", "stream_options"} <= set(body["properties"])
    roles = [kind["properties"]["role"]["enum"] for kind in body["properties"]["messages"]["items"]["anyOf"]]
    assert roles == [["system", "developer", "user"], ["assistant"], ["tool"]]
    assert "$ref" not in str(body) and "$defs" not in str(body)


def test_a_card_says_what_openai_and_vllm_say(live) -> None:
    card = live.http.get("/v1/models/tiny").json()
    assert {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"} == card.keys()
    (permission,) = card["permission"]
    assert (permission["object"], permission["allow_sampling"]) == ("model_permission", True)
    assert live.openai.models.retrieve("tiny").id == "tiny"


def test_head_is_get_without_a_body(live) -> None:
    """On one connection: a body would be taken for the next answer."""
    for path in ("/health", "/v1/models", "/version", "/v1/models/tiny", "/nothing", "/metrics"):
        head, get = live.http.head(path), live.http.get(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        if path != "/metrics":  # which counts this very request
            assert head.headers["content-length"] == get.headers["content-length"]


def test_methods_that_a_path_does_not_have(live) -> None:
    for method, path, allowed in (
        ("GET", "/v1/completions", "POST"),
        ("HEAD", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
        ("OPTIONS", "/v1/completions", "POST"),
        ("BREW", "/v1/completions", None),
    ):
        response = live.http.request(method, path)
        assert response.status_code == (405 if allowed else 400), (method, path)
        if allowed:
            assert response.headers["allow"] == allowed
        if method != "HEAD":
            assert response.json()["error"]["type"] == "invalid_request_error"


def test_request_ids_that_no_header_can_hold(live) -> None:
    for wrong in (b"x" * 257, b"\xff", b"a\tb"):
        response = live.http.get("/health", headers={b"X-Request-Id": wrong})
        assert response.status_code == 400 and "X-Request-Id" in response.json()["error"]["message"]


def test_telemetry_ends_even_if_the_engine_does_not_end_well(start, monkeypatch) -> None:
    server = start()
    closed = []

    async def close() -> None:
        closed.append(True)

    async def shutdown(timeout: float) -> None:
        await whole(timeout)
        raise OSError("gone")

    whole = server.llm.shutdown
    monkeypatch.setattr(server.app.state.telemetry, "close", close)
    monkeypatch.setattr(server.llm, "shutdown", shutdown)
    server.server.should_exit = True
    server.thread.join(60)
    assert closed == [True]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
    ],
)
def test_the_schema_tells_what_answers_and_events_hold(live, path, body) -> None:
    live.play([*live.tokenizer.byte_ids('[{"name": "f", "arguments": {"a": 1}}]'), 2])
    response = live.http.get("/openapi.json").json()["paths"][path]["post"]["responses"]["200"]["content"]
    whole, event = response["application/json"]["schema"], response["text/event-stream"]["x-event"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for more in ({}, {"tools": tools} if "chat" in path else {"n": 2}):
        asked = {**body, **more, "max_tokens": 60}
        jsonschema_rs.validate(whole, live.post(path, **asked).json())
        for chunk in live.events(path, **asked, stream_options={"include_usage": True}):
            jsonschema_rs.validate(event, chunk)
    for wrong in ({}, {"id": "x", "object": "y", "created": 1, "model": "z", "choices": [{"index": "0"}], "usage": {}}):
        assert not jsonschema_rs.is_valid(whole, wrong) and not jsonschema_rs.is_valid(event, wrong)
