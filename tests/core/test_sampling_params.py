import math

import pytest

from jaxpaged.core import sampling_params
from jaxpaged.core.sampling_params import NotYetSupported, SamplingParams
from jaxpaged.errors import InvalidRequestError, UnsupportedError


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
        ("logprobs", [-1, True, 0.5]),
        ("stop", [[""], [3], ["x"] * 17, "y" * 1025]),
        ("stop_token_ids", [[-1], [1.5], [True], [2**31], list(range(65))]),
        ("ignore_eos", [1, None, "yes"]),
        ("detokenize", [0]),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(InvalidRequestError, match=name) as error:
            SamplingParams(**{name: value})
        assert error.value.param == name


@pytest.mark.parametrize("name", sampling_params._NOT_YET)
def test_what_is_not_built_is_refused_not_ignored(name):
    for neutral in sampling_params._NOT_YET[name]:
        SamplingParams(**{name: neutral})
    with pytest.raises(NotYetSupported, match=rf"{name}=.* not supported yet") as error:
        SamplingParams(**{name: 3})
    assert error.value.param == name
    assert isinstance(error.value, ValueError) and isinstance(error.value, UnsupportedError)


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
