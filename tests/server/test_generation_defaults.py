"""Parameters that requests leave out."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.in_process_client import InProcessClient
from jaxpaged.errors import ConfigError
from server.app import create_app
from server.config import ServerConfig
from server.convert import sampling_params
from server.generation_defaults import resolve_generation
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from tests import tiny_tokenizers
from tests.fake_engine import FakeEngine

OF_MODEL = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": [2], "min_p": None,
}  # fmt: skip


def resolved(**options):
    return resolve_generation(ServerConfig(**options), lambda: OF_MODEL).override_generation_config


def test_where_defaults_come_from(tmp_path) -> None:
    assert resolved() == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert resolved(generation_config="vllm") == {}
    override = {"temperature": 0.1, "max_new_tokens": 8}
    assert resolved(override_generation_config=override) == {**override, "top_p": 0.95, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.1}))
    assert resolved(generation_config=str(tmp_path)) == {"repetition_penalty": 1.1}


def of_app(model: str, **options):
    """The defaults of an application that is given its options as they were written."""
    tokenizer = tiny_tokenizers.byte_level()
    engine = FakeEngine([5], vocab_size=tokenizer.vocab_size)
    engine.config = dataclasses.replace(engine.config, model=model)
    llm = AsyncLLM(InProcessClient(engine, tokenizer), tokenizer)
    try:
        return create_app(llm, ServerConfig(**options)).state.serving.config.override_generation_config
    finally:
        llm.close()


def test_whoever_makes_the_application_gets_the_models_defaults(tmp_path, monkeypatch) -> None:
    """Of a folder, and of a model in Hugging Face's cache, without the network."""
    (tmp_path / "config.json").write_text("{}")
    assert of_app(str(tmp_path)) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(OF_MODEL))
    cached = {("org/m", "generation_config.json"): str(tmp_path / "generation_config.json")}
    monkeypatch.setattr("server.generation_defaults.try_to_load_from_cache", lambda *key: cached.get(key))
    for model in (str(tmp_path), "org/m"):
        assert of_app(model) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
        assert of_app(model, generation_config="vllm") == {}
        assert of_app(model, override_generation_config={"top_k": 5})["top_k"] == 5
        with pytest.raises(ConfigError, match="temprature"):
            of_app(model, override_generation_config={"temprature": 1})
    assert of_app("org/other") == {}


def test_defaults_are_resolved_once() -> None:
    once = resolve_generation(ServerConfig(override_generation_config={"min_p": 0.1}), lambda: OF_MODEL)
    assert resolve_generation(once, lambda: {"temperature": 2.0}) == once


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"override_generation_config": {"temprature": 1}}, "temprature"),
        ({"override_generation_config": {"temperature": -1}}, "temperature=-1"),
        ({"override_generation_config": {"temperature": "hot"}}, "temperature"),
        ({"override_generation_config": {"max_new_tokens": 0}}, "max_new_tokens=0"),
        ({"override_generation_config": {"max_new_tokens": "x"}}, "max_new_tokens"),
        ({"generation_config": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_wrong_defaults_are_found_before_the_server_starts(options, part) -> None:
    with pytest.raises(ConfigError, match=part):
        resolved(**options)


def chat(**fields) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


def test_a_request_goes_before_the_defaults() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 32}
    silent = sampling_params(chat(), defaults)
    assert (silent.temperature, silent.top_k, silent.max_tokens) == (0.6, 20, 32)
    asked = sampling_params(chat(temperature=0, top_k=0, max_tokens=5), defaults)
    assert (asked.temperature, asked.top_k, asked.max_tokens) == (0.0, 0, 5)
    assert sampling_params(chat(max_tokens=1000), defaults).max_tokens == 32  # as in vLLM: a bound for everyone
    assert sampling_params(chat()).temperature == 1.0
    completion = CompletionRequest.model_validate({"prompt": "x"})
    assert sampling_params(completion, defaults).max_tokens == 16


def test_a_beam_search_takes_no_sampling_defaults() -> None:
    params = sampling_params(chat(use_beam_search=True, n=2, max_tokens=4), {"temperature": 0.6, "top_k": 20})
    assert params.use_beam_search and params.top_k == 0
