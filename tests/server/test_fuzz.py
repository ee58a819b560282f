"""Requests that the OpenAPI schema allows, and ones that it does not. Case B48's kind.

Whatever comes: no fault of the server's, an answer that the schema tells of, and the engine as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests import tiny_tokenizers
from tests.server.conftest import LiveServer

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = {GenerationMode.POSITIVE: 60, GenerationMode.NEGATIVE: 30}
WITHOUT_A_BODY = 5
ADMIN_KEY = "sk-admin"
# Larger ones are tested by hand, in test_limits: here they would only take time.
SMALL = {"n": 2, "best_of": 2, "beam_width": 2, "max_tokens": 8, "max_completion_tokens": 8}
REQUIRED_OF = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", "/v1/embeddings": "input"}
REQUIRED = frozenset(REQUIRED_OF.values())
FEW = 3  # messages, parts, texts, tokens
LAST_TOKEN = 200


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("traces")
    server = LiveServer(tiny_tokenizers.byte_level(), admin_api_key=(ADMIN_KEY,), profiler_dir=str(folder))
    server.play(list(server.tokenizer.byte_ids("Hi!")), follow_grammars=True)
    yield server
    server.settle()
    assert server.post("/v1/completions", prompt="x", max_tokens=3).json()["choices"][0]["text"] == "Hi!"
    server.stop()


def small(schema: Any) -> Any:
    """A schema that generates no long outputs, and few and short things of what there may be many of."""
    if isinstance(schema, dict):
        schema = {key: small(value) for key, value in schema.items()}
        for name in REQUIRED & schema.get("properties", {}).keys():
            schema["properties"][name] = few(schema["properties"][name])
        for name, most in SMALL.items():
            for kind in schema.get("properties", {}).get(name, {}).get("anyOf", ()):
                if kind.get("type") == "integer":
                    kind["maximum"] = most
        return schema
    return [small(item) for item in schema] if isinstance(schema, list) else schema


def few(schema: Any) -> Any:
    """Of every list, one to FEW items; no other keys of objects; tokens that there are."""
    if isinstance(schema, list):
        return [few(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: few(value) for key, value in schema.items()}
    bounds = {
        "array": {"minItems": 1, "maxItems": FEW},
        "object": {"additionalProperties": False},
        "integer": {"minimum": 0, "maximum": LAST_TOKEN},
    }
    return {**schema, **bounds.get(str(schema.get("type")), {})}


def operations() -> list[tuple[str, str]]:
    """Those of an app with every route."""
    server = LiveServer(tiny_tokenizers.byte_level())
    try:
        paths = server.app.openapi()["paths"]
    finally:
        server.stop()
    return [(path, method) for path, methods in paths.items() for method in methods]


OPERATIONS = operations()


def test_every_route_is_fuzzed(fuzzed) -> None:
    documented = {path for path, _ in OPERATIONS}
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models/{name}", "/health", "/metrics"} <= documented


@pytest.mark.parametrize("mode", EXAMPLES, ids=lambda mode: mode.value)
@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=[f"{method}-{path}" for path, method in OPERATIONS])
def test_whatever_is_sent(fuzzed, path, method, mode) -> None:
    described = small(fuzzed.http.get("/openapi.json").json())
    operation = schemathesis.openapi.from_dict(described)[path][method]
    has_body = "requestBody" in described["paths"][path][method]
    if mode is GenerationMode.NEGATIVE and not has_body:
        pytest.skip("there is nothing to get wrong")
    statuses = []

    @settings(
        max_examples=EXAMPLES[mode] if has_body else WITHOUT_A_BODY,
        derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode), st.data())
    def ask(case: schemathesis.Case, data: st.DataObject) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and case.body:
            kept = data.draw(st.sets(st.sampled_from(sorted(case.body)), max_size=4))
            case.body = {name: value for name, value in case.body.items() if name in kept or name in REQUIRED}
        case.headers["Authorization"] = f"Bearer {ADMIN_KEY}"
        response = send(fuzzed, case)
        statuses.append(response.status_code)
        case.validate_response(response, checks=CHECKS)

    ask()
    if path in REQUIRED_OF:
        assert (statuses.count(200) > len(statuses) / 5) == (mode is GenerationMode.POSITIVE), statuses


def send(server: LiveServer, case: schemathesis.Case) -> httpx.Response:
    arguments = case.as_transport_kwargs(base_url=server.url)
    return server.http.request(
        arguments["method"], arguments["url"],
        **{name: arguments[name] for name in ("json", "params") if arguments.get(name) is not None},
        content=arguments.get("data"), headers=dict(arguments.get("headers") or {}),
    )  # fmt: skip
