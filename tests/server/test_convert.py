"""Bodies to sampling parameters: each field arrives, contradictions do not, faults name what was sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputs
from jaxpaged.errors import InvalidRequestError
from server.convert import named_as_sent, sampling_params
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.generation import GenerationRequest

MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate(json.loads(json.dumps({"prompt": "x", **fields})))


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate(json.loads(json.dumps({"messages": MESSAGES, **fields})))


def refusal(body: GenerationRequest) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught, named_as_sent(body):
        sampling_params(body)
    return caught.value


FIELDS: dict[str, Any] = {
    "n": 2, "best_of": 3, "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "seed": -7,
    "presence_penalty": -1.5, "frequency_penalty": 2, "repetition_penalty": 1.5, "allowed_token_ids": [1, 2],
    "bad_words": ["a", "b c"], "stop": ["zzz"], "stop_token_ids": [9], "include_stop_str_in_output": True,
    "ignore_eos": True, "min_tokens": 2, "timeout": 2.5, "prompt_logprobs": 3, "logprob_token_ids": [4, 5],
    "logprobs_mode": "processed_logprobs", "logits_processors": {"name": {"strength": 0.5}},
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "truncate_prompt_tokens": -1,
}  # fmt: skip


@pytest.mark.parametrize("body", [completion(**FIELDS, logprobs=1), chat(**FIELDS, logprobs=True, top_logprobs=1)])
def test_every_field_arrives(body) -> None:
    params = sampling_params(body)
    assert {name: getattr(params, name) for name in FIELDS} == FIELDS
    assert params.logprobs == 1


def test_beam_search_arrives() -> None:
    wanted = {"use_beam_search": True, "beam_width": 4, "length_penalty": 0.5, "early_stopping": "never", "n": 2}
    for body in (completion(**wanted), chat(**wanted)):
        params = sampling_params(body)
        assert {name: getattr(params, name) for name in wanted} == wanted


def test_no_parameter_is_left_out() -> None:
    """What SamplingParams gains must be said here: it is a field of bodies or it is not."""
    ours = set(SamplingParams.__struct_fields__) - {"detokenize", "output_kind", "shown_special_ids"}
    for model in (CompletionRequest, ChatCompletionRequest):
        assert ours <= set(model.model_fields)


def test_what_is_absent_null_or_empty_is_the_default() -> None:
    plain = sampling_params(completion())
    assert plain == SamplingParams(max_tokens=16, output_kind="final")
    nothing = dict.fromkeys(FIELDS) | {"logit_bias": {}, "bad_words": [], "logits_processors": {}}
    assert sampling_params(completion(**nothing)) == plain
    assert sampling_params(chat()) == SamplingParams(max_tokens=None, output_kind="final")
    assert sampling_params(completion(stream=True)).output_kind == "delta"


def test_logit_bias_has_numbers_for_keys() -> None:
    assert sampling_params(completion(logit_bias={"5": -100, "070": 1.5})).logit_bias == {5: -100, 70: 1.5}


@pytest.mark.parametrize(
    ("fields", "prompt_logprobs"),
    [
        ({"logprobs": 2}, None),
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 2}, 2),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 5}, 5),
        ({"echo": True, "logprobs": 5, "prompt_logprobs": 2}, 5),
        ({"echo": True, "logprobs": -1, "prompt_logprobs": 2}, -1),
        ({"echo": True, "max_tokens": 0}, 0),
        ({"prompt_logprobs": 1, "max_tokens": 0}, 1),
    ],
)
def test_echo_takes_the_prompts_logprobs(fields, prompt_logprobs) -> None:
    assert sampling_params(completion(**fields)).prompt_logprobs == prompt_logprobs


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (chat(logprobs=True, top_logprobs=-2), "top_logprobs", "top_logprobs=-2"),
        (chat(max_completion_tokens=-3), "max_completion_tokens", "max_completion_tokens=-3"),
        (chat(max_tokens=0), "max_tokens", "max_tokens=0"),
        (completion(max_tokens=0), "max_tokens", "max_tokens=0"),
        (completion(max_tokens=0, logprobs=1), "max_tokens", "max_tokens=0"),
        (completion(echo=True, logprobs=-2), "logprobs", "logprobs=-2"),
        (completion(n=2, best_of=1), "best_of", "best_of=1"),
        (completion(best_of=2, stream=True), "best_of", "streamed"),
        (completion(truncate_prompt_tokens=0), "truncate_prompt_tokens", "0"),
        (completion(logprob_token_ids=[1]), "logprob_token_ids", "logprobs"),
        (completion(logprobs=1, logprob_token_ids=[]), "logprob_token_ids", "0 entries"),
        (completion(use_beam_search=True, top_k=5), "top_k", "beam search"),
        (completion(use_beam_search=True, guided_regex="a"), "guided_regex", "guided_regex"),
        (completion(allowed_token_ids=[]), "allowed_token_ids", "0 entries"),
        (completion(bad_words=[""]), "bad_words", "''"),
        (completion(repetition_penalty=0), "repetition_penalty", "0"),
        (completion(logit_bias={"5": 1e9}), "logit_bias", "1000000000.0"),
    ],
)
def test_faults_are_named_as_sent(body, param, words) -> None:
    error = refusal(body)
    assert error.param == param and words in str(error)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_json": "{"}, "guided_json: no"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format: no"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json: no"),
    ],
)
def test_a_part_that_was_not_sent_is_not_named(fields, message) -> None:
    with pytest.raises(InvalidRequestError) as caught, named_as_sent(completion(**fields)):
        raise InvalidRequestError("structured_outputs.json: no", param="structured_outputs")
    assert str(caught.value) == message and caught.value.param == message.partition(":")[0].partition(".")[0]


FORMS = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        StructuredOutputs(json=SCHEMA),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        StructuredOutputs(json_object=True),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, StructuredOutputs(json=json.dumps(SCHEMA))),
    ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=["a", "b"])),
    ({"structured_outputs": {"grammar": "root ::= 1"}}, StructuredOutputs(grammar="root ::= 1")),
    ({"structured_outputs": {"json_object": True}}, StructuredOutputs(json_object=True)),
    ({"guided_json": SCHEMA}, StructuredOutputs(json=SCHEMA)),
    ({"guided_json": "{}"}, StructuredOutputs(json="{}")),
    ({"guided_json": {}}, StructuredOutputs(json={})),
    ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
    ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=["a", "b"])),
    ({"guided_grammar": "root ::= 1"}, StructuredOutputs(grammar="root ::= 1")),
    ({"guided_json_object": True}, StructuredOutputs(json_object=True)),
    ({"guided_json_object": False, "guided_json": None}, None),
    ({"response_format": {"type": "text"}, "guided_regex": "a+"}, StructuredOutputs(regex="a+")),
]


@pytest.mark.parametrize(("fields", "form"), FORMS)
def test_the_form_of_the_text_in_every_spelling(fields, form) -> None:
    for body in (completion(**fields), chat(**fields)):
        assert sampling_params(body).structured_outputs == form


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ],
)
def test_two_forms_at_once_or_none_are_refused(fields, param) -> None:
    for body in (completion(**fields), chat(**fields)):
        assert refusal(body).param == param
