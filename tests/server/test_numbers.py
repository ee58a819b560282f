"""No number but a plain one passes, in any field, and nobody else notices. Case S14."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import BaseModel

from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest

BODIES = {
    "/v1/completions": (CompletionRequest, '"prompt": "x"'),
    "/v1/chat/completions": (ChatCompletionRequest, '"messages": [{"role": "user", "content": "x"}]'),
}
NO_NUMBERS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", str(2**70), "9" * 4300, "9" * 6000, "true", '"1"', "[]",
)  # fmt: skip
# What a field needs beside itself, else it would be refused for that.
BESIDE = {"top_logprobs": '"logprobs": true', "logprob_token_ids": '"logprobs": {one}'}


def numeric_fields(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Each field that takes numbers, with how one is written there: every new field is among them by itself."""
    for name, schema in model.model_json_schema()["properties"].items():
        if name == "prompt":  # texts or ids, by what they look like: tested with completions
            continue
        for kind in schema.get("anyOf", [schema]):
            if kind.get("type") in ("integer", "number"):
                yield name, "{}"
            elif kind.get("items", {}).get("type") in ("integer", "number"):
                yield name, "[{}]"
            elif name == "logit_bias":
                yield name, '{{"5": {}}}'
                break


CASES = [(path, name, form) for path, (model, _) in BODIES.items() for name, form in numeric_fields(model)]


def test_the_fields_are_found() -> None:
    names = {name for path, name, _ in CASES if path == "/v1/completions"}
    assert {"temperature", "seed", "n", "priority", "logit_bias", "stop_token_ids", "timeout"} <= names
    assert len(names) > 20


@pytest.mark.parametrize(("path", "name", "form"), CASES, ids=[f"{path[4:8]}-{name}" for path, name, _ in CASES])
def test_only_numbers_pass_as_numbers(live, path, name, form) -> None:
    one = "1" if path == "/v1/completions" else "true"
    base = ", ".join(filter(None, [BODIES[path][1], BESIDE.get(name, "").format(one=one)]))
    for wrong in NO_NUMBERS:
        raw = "{" + ", ".join(filter(None, [base, f'"{name}": {form.format(wrong)}'])) + "}"
        response = live.http.post(path, content=raw.encode(), headers={"Content-Type": "application/json"})
        assert response.status_code == 400, (wrong, response.text)
        error = response.json()["error"]
        too_long = wrong.startswith("999")  # not even read as a number
        assert error["param"] == name or (too_long and error["param"] is None), (wrong, error)
        assert len(error["message"]) < 500


def test_refused_numbers_do_not_touch_a_neighbour(live) -> None:
    """A request that runs meanwhile answers as if it were alone."""
    live.play(live.engine.script, delay=0.002)
    text = "undisturbed " * 8
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(live.post, "/v1/completions", prompt=text, max_tokens=200)
        while not neighbour.done():
            response = live.http.post("/v1/completions", content=b'{"prompt": "x", "temperature": NaN}')
            assert response.status_code == 400
    assert neighbour.result().json()["choices"][0]["text"] == text


def test_a_contradiction_echoes_no_endless_number(live) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "max_completion_tokens": 10**4299}
    error = live.post("/v1/chat/completions", **body).json()["error"]
    assert error["param"] == "max_tokens" and "contradicts" in error["message"] and len(error["message"]) < 300
