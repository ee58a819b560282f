import math
import time

import pytest

from jaxpaged.core import sampling_params
from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputs
from jaxpaged.errors import InvalidRequestError

pytestmark = pytest.mark.usefixtures("frozen_heap")  # times are taken


def test_defaults_are_valid_and_ask_for_nothing_special():
    params = SamplingParams()
    assert not params.greedy and params.stop_strings == []


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, 100.5, "1", True, None]),
        ("top_p", [-0.1, 1.1, math.nan, False]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("top_k", [-2, 1.5, 2**31, True]),
        ("seed", [2**63, 1.0, True]),
        ("min_tokens", [-1, 1.0, 17]),
        ("max_tokens", [0, -1, 1.5, True]),
        ("logprobs", [-2, True, 0.5]),
        ("stop", [[""], [3], ["x"] * 17, "y" * 1025]),
        ("stop_token_ids", [[-1], [1.5], [True], [2**31], list(range(65))]),
        ("ignore_eos", [1, None, "yes"]),
        ("detokenize", [0]),
        ("n", [0, -1, 129]),
        ("presence_penalty", [-2.1, 2.1, math.inf, "1"]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0, -1.0, math.inf]),
        ("timeout", [-1, math.inf]),
        ("prompt_logprobs", [-2, True]),
        ("length_penalty", [11, math.nan]),
        ("early_stopping", [1, "always"]),
        ("output_kind", ["all", 0]),
        ("logprobs_mode", ["both", 1]),
        ("truncate_prompt_tokens", [-2, 1.0]),
        ("bad_words", [[""], ["a" * 1025], "abc"]),
        ("logits_processors", [{"a": 1}, ["a"]]),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(InvalidRequestError, match=name) as error:
            SamplingParams(**{name: value})
        assert error.value.param == name


def test_every_field_is_checked_and_described():
    """A field without a check would let NaN, or a million entries, through."""
    fields = set(SamplingParams.__struct_fields__)
    assert set(sampling_params._FIELDS) == fields
    described = {line.split(":")[0].strip() for line in SamplingParams.__doc__.splitlines() if line.startswith(" " * 6)}
    assert fields <= described


@pytest.mark.parametrize("name", sorted(sampling_params._FIELDS))
@pytest.mark.parametrize(
    "value", [object(), math.nan, {"a": object()}, [object()]], ids=["object", "nan", "dict", "list"]
)
def test_nonsense_is_refused_by_name(name, value):
    """S14: no field takes NaN, an unknown type, or a container of it."""
    with pytest.raises(InvalidRequestError, match=name) as error:
        SamplingParams(**{name: value})
    assert error.value.param == name


@pytest.mark.parametrize(
    "options",
    [
        {"n": 10**6},
        {"best_of": 10**9},
        {"logit_bias": dict.fromkeys(range(10**6), 1.0)},
        {"stop": ["x"] * 10**5},
        {"stop": "x" * 10**7},
        {"bad_words": ["x"] * 10**5},
        {"logprob_token_ids": list(range(10**6))},
        {"beam_width": 10**6, "use_beam_search": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_no_request_fans_out_to_a_million(options):
    """S13: refused by size, before anything is built from it."""
    begin = time.thread_time()
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**options)
    assert len(str(error.value)) < 300 and time.thread_time() - begin < 0.1


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {"7": 1.0}}, "logit_bias"),
        ({"logit_bias": {7: 1e9}}, "logit_bias"),
        ({"logit_bias": {7: math.nan}}, "logit_bias"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 1, "best_of": 2, "output_kind": "delta"}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"beam_width": 2}, "beam_width"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": "never"}, "early_stopping"),
        ({"use_beam_search": True, "beam_width": 2, "n": 3}, "beam_width"),
        ({"use_beam_search": True, "beam_width": 2, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "beam_width": 2, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "structured_outputs": StructuredOutputs(regex="a")}, "structured_outputs"),
        ({"use_beam_search": True, "logprobs": 1, "logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"use_beam_search": True, "max_tokens": 0, "prompt_logprobs": 1}, "max_tokens"),
    ],
    ids=str,
)
def test_contradictions_are_refused_by_name(options, param):
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**options)
    assert error.value.param == param


@pytest.mark.parametrize("wrong", [-1, 2**31, True, 1.0, "1", None])
def test_every_one_of_many_token_ids_is_checked(wrong):
    many = list(range(1000))
    assert SamplingParams(allowed_token_ids=many).allowed_token_ids == many
    with pytest.raises(InvalidRequestError, match=f"allowed_token_ids={wrong!r} must be an integer"):
        SamplingParams(allowed_token_ids=[*many, wrong, *many])


def test_samples_and_beams_are_counted():
    assert SamplingParams().num_samples == 1
    assert SamplingParams(n=2).num_samples == 2
    assert SamplingParams(n=2, best_of=5).num_samples == 5
    beams = SamplingParams(n=2, use_beam_search=True, beam_width=4)
    assert (beams.num_samples, beams.num_beams) == (1, 4)
    assert SamplingParams(use_beam_search=True, best_of=3).num_beams == 3
    assert SamplingParams(use_beam_search=True, best_of=3, beam_width=3).num_beams == 3
    with pytest.raises(InvalidRequestError, match="best_of=8"):
        SamplingParams(use_beam_search=True, best_of=8, beam_width=4)


def test_structured_outputs_take_exactly_one_kind():
    assert StructuredOutputs(json={}).kind == "json"
    assert StructuredOutputs(json_object=True, regex=None).kind == "json_object"
    for options in ({}, {"regex": "a", "choice": ["a"]}, {"json_object": False}):
        with pytest.raises(InvalidRequestError, match="exactly one") as error:
            StructuredOutputs(**options)
        assert error.value.param == "structured_outputs"


def test_limits_are_accepted():
    SamplingParams(temperature=0, top_p=1, min_p=1, top_k=-1, seed=-(2**63), logprobs=0, max_tokens=1)
    SamplingParams(stop=["x" * 1024] * 16, stop_token_ids=list(range(64)), min_tokens=16, max_tokens=16)
    SamplingParams(min_tokens=1000, max_tokens=None)


@pytest.mark.parametrize(
    ("options", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 1e-4}, True),
        ({"temperature": 1e-3}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0.0}, True),
        ({"min_p": 1.0}, True),
        ({"top_k": 2, "top_p": 0.1}, False),
    ],
)
def test_greedy(options, greedy):
    assert SamplingParams(**options).greedy is greedy


def test_stop_is_text_or_texts():
    assert SamplingParams(stop="ab").stop_strings == ["ab"]
    assert SamplingParams(stop=["a", "b"]).stop_strings == ["a", "b"]
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop="ab", detokenize=False)


@pytest.mark.parametrize(
    "bad", [{"n": True}, {"presence_penalty": False}, {"stop": 5}, {"stop_token_ids": 5}, {"n": 1.0}], ids=str
)
def test_values_of_another_type_are_refused(bad) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(bad))):
        SamplingParams(**bad)


@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({}, None),
        ({"logprobs": 3}, 3),
        ({"logprobs": -1}, -1),
        ({"n": 2}, None),
        ({"n": 2, "best_of": 3}, 0),
        ({"n": 2, "best_of": 3, "logprobs": 5}, 5),
    ],
)
def test_logprobs_that_each_step_must_tell(params, count) -> None:
    assert SamplingParams(**params).num_logprobs == count
