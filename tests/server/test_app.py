"""The small routes and request ids."""

from __future__ import annotations

import jaxpaged


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


def test_the_schema_names_every_field(live) -> None:
    schema = live.http.get("/openapi.json").json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "max_completion_tokens", "top_logprobs", "stream_options"} <= set(body["properties"])
    assert "$ref" not in str(body) and "$defs" not in str(body)
