"""Every field that OpenAI or vLLM has is honoured, asks for nothing, or is refused by name. Case B48's kind."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.generation import StreamOptions
from server.protocol.refused import NOT_YET_STRUCTURED

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {
    COMPLETIONS: (CompletionRequest, {"prompt": "x"}),
    CHAT: (ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}]}),
}


def words(text: str) -> list[str]:
    return text.split()


COMMON = words("""
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
    stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs mm_payload cache_salt
    kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
    thinking_token_budget stream_interval best_of logits_processors
    guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern
    service_tier store metadata
""")
OF = {
    COMPLETIONS: words("prompt suffix prompt_embeds"),
    CHAT: words("""
        messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
        parallel_tool_calls add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
        media_io_kwargs mm_processor_kwargs return_prompt_text functions function_call modalities audio prediction
        verbosity web_search_options safety_identifier prompt_cache_key prompt_cache_retention
    """),
}
# Of a refused field, a value that asks for something.
ASKS: dict[str, Any] = {
    "add_special_tokens": True,
    "routed_experts_prompt_start": 1,
    "return_token_offsets": True,
    "return_prompt_text": True,
    "thinking_token_budget": 5,
    "watermarking": True,
    "modalities": ["text", "audio"],
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "moderation": {"model": "omni-moderation-latest"},
}
NOTHING_TO_ASK = {"return_mm_kwargs", "mm_payload"}
REFUSED = [(path, name) for path, (model, _) in BODIES.items() for name in sorted(model.not_yet)]


@pytest.mark.parametrize("path", BODIES)
def test_each_field_is_decided_on(path) -> None:
    model, _ = BODIES[path]
    undecided = {*COMMON, *OF[path]} - model.model_fields.keys() - model.not_yet.keys()
    assert not undecided
    assert not model.model_fields.keys() & model.not_yet.keys()
    assert {"include_usage", "continuous_usage_stats", "include_obfuscation"} <= StreamOptions.model_fields.keys()


@pytest.mark.parametrize(
    ("model", "params"),
    [
        (ChatCompletionRequest, chat_create_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
        (EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
    ],
)
def test_each_field_of_the_openai_client_is_decided_on(model, params) -> None:
    undecided = get_type_hints(params).keys() - model.model_fields.keys() - model.not_yet.keys()
    assert not undecided, (
        f"this version of the `openai` client sends {sorted(undecided)} to {model.__name__}: "
        "build them, or refuse them by name in server/protocol/refused.py"
    )


@pytest.mark.parametrize("field", ["reasoning_effort", "service_tier", "prompt_cache_retention"])
def test_each_value_of_the_openai_client_is_known(live, field) -> None:
    hint = get_type_hints(chat_create_params.CompletionCreateParamsStreaming).get(field)
    for value in literals(hint):
        assert live.post(CHAT, **BODIES[CHAT][1], **{field: value}).status_code == 200, value


def literals(hint: Any) -> list[Any]:
    """The values in a union of literals."""
    inner = getattr(hint, "__args__", ())
    return [
        value
        for item in inner
        for value in (literals(item) if hasattr(item, "__args__") else [item])
        if isinstance(value, str)
    ]


@pytest.mark.parametrize(("name", "neutral"), NOT_YET_STRUCTURED.items())
def test_what_is_not_built_of_structured_outputs(live, name, neutral) -> None:
    live.play([*live.tokenizer.byte_ids("a"), 2])
    base = {**BODIES[CHAT][1], "max_tokens": 4}
    for nothing in (None, *neutral):
        asked = {"regex": "a", name: nothing}
        answer = live.post(CHAT, **base, structured_outputs=asked)
        assert answer.json()["choices"][0]["message"]["content"] == "a"
    error = live.post(CHAT, **base, structured_outputs={"regex": "a", name: True}).json()["error"]
    assert (error["param"], error["code"]) == ("structured_outputs", "unsupported")
    assert error["message"] == f"structured_outputs.{name}=True is not supported"


CHANGES_NOTHING = {"store": True, "stream_interval": 5, "guided_decoding_backend": "xgrammar", "verbosity": "high"}


@pytest.mark.parametrize("name", CHANGES_NOTHING)
@pytest.mark.parametrize("path", BODIES)
def test_what_changes_no_answer_is_accepted(live, path, name) -> None:
    """Of a field, values of its type; `verbosity` is one of chats."""
    live.play([*live.tokenizer.byte_ids("as ever"), 2])
    body = {**BODIES[path][1], name: CHANGES_NOTHING[name]}
    if (name, path) == ("verbosity", COMPLETIONS):
        assert live.post(path, **body).status_code == 400
        return
    choice = live.post(path, **body).json()["choices"][0]
    assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == "as ever"
    choices = [event["choices"][0] for event in live.events(path, **body)]
    pieces = [choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "") for choice in choices]
    assert "".join(pieces) == "as ever"
    assert live.post(path, **{**body, name: []}).json()["error"]["param"] == name


PAIR = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
WITH_BLANKS = [
    {"guided_json": PAIR, "guided_whitespace_pattern": "[_]*"},
    {"guided_json": json.dumps(PAIR), "guided_whitespace_pattern": "[_]*"},
    {"structured_outputs": {"json": PAIR, "whitespace_pattern": "[_]*"}},
    {"structured_outputs": {"json": PAIR, "whitespace_pattern": "[_]*"}, "guided_whitespace_pattern": "x"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PAIR}},
     "guided_whitespace_pattern": "[_]*"},
]  # fmt: skip


@pytest.mark.parametrize("form", WITH_BLANKS)
def test_patterns_of_white_space_are_followed(live, form) -> None:
    text = '{_"a":__1}'
    live.play(live.tokenizer.byte_ids(text))
    assert live.post(COMPLETIONS, prompt="x", max_tokens=40, **form).json()["choices"][0]["text"] == text
    live.play(live.tokenizer.byte_ids(text.replace("_", " ")))
    assert live.post(COMPLETIONS, prompt="x", max_tokens=40, **form).status_code != 200


@pytest.mark.parametrize(
    ("form", "param"),
    [({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_regex"),
     ({"guided_json": PAIR, "guided_whitespace_pattern": "(("}, "guided_json"),
     ({"guided_json": "{", "guided_whitespace_pattern": " "}, "guided_json"),
     ({"guided_json": PAIR, "guided_whitespace_pattern": 5}, "guided_whitespace_pattern"),
     ({"structured_outputs": {"choice": ["a"], "whitespace_pattern": " "}}, "structured_outputs")],
)  # fmt: skip
def test_patterns_of_white_space_that_say_nothing(live, form, param) -> None:
    error = live.post(COMPLETIONS, prompt="x", **form).json()["error"]
    assert error["param"] == param, error


@pytest.mark.parametrize(("path", "name"), REFUSED)
def test_what_is_not_built_is_refused_when_it_is_asked_for(live, path, name) -> None:
    model, base = BODIES[path]
    for nothing in (None, *model.not_yet[name]):
        assert live.post(path, **base, **{name: nothing}).status_code == 200, nothing
    if name in NOTHING_TO_ASK:
        return
    for value in (ASKS.get(name, {"x": 1}), "something"):
        error = live.post(path, **base, **{name: value}).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported")
        assert error["message"].startswith(name)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["tempratrue", "extra", "_", "model_config", "not_yet", "__class__", "Model", "ü", ""])
def test_unknown_fields_are_refused_by_name(live, path, name) -> None:
    """Not dropped, as elsewhere: who misspells a field should hear of it."""
    for value in (None, 1):
        response = live.post(path, **{**BODIES[path][1], name: value})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, name)
        assert error["message"] == f"unknown field {name!r}; it is refused rather than ignored"


@pytest.mark.parametrize("tier", [None, "auto", "default", "flex", "scale", "priority", "fast"])
@pytest.mark.parametrize("path", BODIES)
def test_the_tier_that_answered_is_told_where_one_was_asked_for(live, path, tier) -> None:
    body = {**BODIES[path][1], "service_tier": tier, "max_tokens": 2}
    answers = [live.post(path, **body).json(), *live.events(path, **body)]
    assert [a.get("service_tier") for a in answers] == [None if tier is None else "default"] * len(answers)
    assert live.post(path, **{**body, "service_tier": "gold"}).json()["error"]["param"] == "service_tier"


def test_extra_fields_through_the_openai_client(live) -> None:
    chat = live.openai.chat.completions
    messages = BODIES[CHAT][1]["messages"]
    answer = chat.create(model="tiny", messages=messages, extra_body={"top_k": 5, "ignore_eos": True}, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    for ignored in ({"metadata": {"a": "b"}}, {"store": False}, {"service_tier": "auto"}, {"user": "me"}):
        assert chat.create(model="tiny", messages=messages, **ignored).choices
