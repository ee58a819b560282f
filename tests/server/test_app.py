"""The small routes, request ids and API keys."""

from __future__ import annotations

import pytest

import jaxpaged
from tests.server.conftest import LiveServer


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


def test_no_origin_is_allowed_by_default(live) -> None:
    response = live.http.get("/v1/models", headers={"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in response.headers


def test_the_schema_names_every_field(live) -> None:
    schema = live.http.get("/openapi.json").json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "max_completion_tokens", "top_logprobs", "stream_options"} <= set(body["properties"])
    assert "$ref" not in str(body) and "$defs" not in str(body)


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "Basic one", "Bearer onee", "one", "Bearer on"])
def test_without_a_key_everything_but_the_probes_is_closed(start, header) -> None:
    server: LiveServer = start(api_key=("one", "two"))
    headers = {"Authorization": header} if header else {}
    for path in ("/v1/models", "/openapi.json", "/docs", "/nothing"):
        response = server.http.get(path, headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
    assert server.http.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 401
    for path in ("/health", "/ping", "/version"):
        assert server.http.get(path, headers=headers).status_code == 200


def test_any_of_the_keys_opens(start) -> None:
    server: LiveServer = start(api_key=("one", "two"))
    for key in ("one", "two"):
        client = server.openai.with_options(api_key=key)
        assert client.completions.create(model="tiny", prompt="x").choices[0].text == "x"
