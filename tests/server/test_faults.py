"""Bodies with a million faults cost no more than one fault does."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from server.body import _checked
from server.errors import APIError
from server.protocol.body import Body, Strict
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest

pytestmark = pytest.mark.usefixtures("frozen_heap")  # times are taken

BODIES = (ChatCompletionRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest)
HELLO = [{"role": "user", "content": "x"}]
KEYS = {f"k{i}": 1 for i in range(200_000)}
TOOL = {"type": "function", "function": {"name": "f"}}
# (model, body, param)
FAULTY: list[tuple[type[Body], dict[str, Any], str]] = [
    (DetokenizeRequest, {"tokens": ["a"] * 100_000}, "tokens"),
    (DetokenizeRequest, {"tokens": [1.5] * 1_000_000}, "tokens"),
    (DetokenizeRequest, {"tokens": [1], **KEYS}, "k0"),
    (TokenizeRequest, {"prompt": "x", **KEYS}, "k0"),
    (EmbeddingRequest, {"input": "x", **KEYS}, "k0"),
    (CompletionRequest, {"prompt": "x", **KEYS}, "k0"),
    (CompletionRequest, {"prompt": "x", "stream": True, "stream_options": KEYS}, "stream_options"),
    (CompletionRequest, {"prompt": "x", "structured_outputs": KEYS}, "structured_outputs"),
    (CompletionRequest, {"prompt": "x", "response_format": {"type": "text", **KEYS}}, "response_format"),
    (CompletionRequest, {"prompt": "x", "logits_processors": KEYS}, "logits_processors"),
    (CompletionRequest, {"prompt": "x", "logits_processors": {"a": 1}}, "logits_processors"),
    (CompletionRequest, {"prompt": "x", "logit_bias": KEYS}, "logit_bias"),
    (CompletionRequest, {"prompt": "x", "allowed_token_ids": ["a"] * 200_000}, "allowed_token_ids"),
    (ChatCompletionRequest, {"messages": HELLO, "tools": [{**TOOL, **KEYS}]}, "tools"),
    (ChatCompletionRequest, {"messages": HELLO, "tools": [{"type": "function", "function": KEYS}]}, "tools"),
    (ChatCompletionRequest, {"messages": HELLO, "documents": [1] * 1000}, "documents"),
    (ChatCompletionRequest, {"messages": HELLO, "tool_choice": KEYS}, "tool_choice"),
]


@pytest.mark.parametrize(("model", "body", "param"), FAULTY)
def test_a_million_faults_are_told_as_one(model, body, param) -> None:
    raw = json.dumps(body).encode()
    begin = time.thread_time()
    with pytest.raises(APIError) as caught:
        _checked(raw, model)
    seconds = time.thread_time() - begin
    begin = time.thread_time()
    json.loads(raw)
    assert seconds < 0.2 + 3 * (time.thread_time() - begin)  # most of it is reading the JSON
    assert (caught.value.status, caught.value.param) == (400, param) and len(str(caught.value)) < 400


def schemas(node: Any) -> Iterator[dict[str, Any]]:
    """The parts of a schema of pydantic's."""
    if isinstance(node, dict):
        if isinstance(node.get("type"), str):
            yield node
        for key, item in node.items():
            if key not in ("metadata", "serialization"):
                yield from schemas(item)
    elif isinstance(node, list | tuple):
        for item in node:
            yield from schemas(item)


@pytest.mark.parametrize("model", BODIES)
def test_every_part_of_a_body_ends_at_its_first_fault(model: type[BaseModel]) -> None:
    parts = list(schemas(model.__pydantic_core_schema__))
    assert all(issubclass(part["cls"], Strict) for part in parts if part["type"] == "model")
    lists = [part for part in parts if part["type"] in ("list", "set")]  # JSON has no tuples
    assert all(part.get("fail_fast") for part in lists), lists
    guarded = [part["schema"] for part in parts if part["type"] == "function-before"]
    for part in parts:
        if part["type"] == "dict" and part.get("values_schema", {"type": "any"})["type"] != "any":
            assert part in guarded, f"nothing looks at the items of {part} before pydantic does"


def test_these_are_all_bodies(live) -> None:
    paths = live.http.get("/openapi.json").json()["paths"]
    with_body = [path for path, methods in paths.items() if "requestBody" in methods.get("post", ())]
    assert len(with_body) == len(BODIES), with_body


def test_messages_name_what_was_sent_and_the_limit_it_broke(live) -> None:
    sent = {"prompt": "x", "response_format": {"type": "json_object"}, "use_beam_search": True, "beam_width": 2}
    told = live.post("/v1/completions", **sent).json()["error"]
    assert (told["param"], told["message"]) == ("response_format", "beam search takes no response_format")
    told = live.post("/v1/completions", prompt="x", allowed_token_ids=[]).json()["error"]
    assert (told["param"], told["message"]) == ("allowed_token_ids", "allowed_token_ids has 0 entries, at least 1")
