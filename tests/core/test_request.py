import pytest

from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams


def make(prompt=(1, 2, 3), *, max_model_len=10, eos=(), seed=5, **params):
    return Request("r", prompt, SamplingParams(**params), max_model_len=max_model_len, eos_token_ids=eos, seed=seed)


def test_tokens_are_split_into_prompt_and_output():
    prompt = [1, 2, 3]
    request = make(prompt)
    request.all_token_ids += [4, 5]
    assert prompt == request.prompt_token_ids == [1, 2, 3]
    assert request.output_token_ids == [4, 5]
    assert (request.num_tokens, request.num_output_tokens) == (5, 2)


@pytest.mark.parametrize(("max_tokens", "total"), [(1, 4), (7, 10), (8, 10), (None, 10)])
def test_it_ends_at_max_tokens_or_the_context(max_tokens, total):
    assert make(max_tokens=max_tokens).max_total_tokens == total


def test_the_users_seed_wins():
    assert make(seed=5).seed == 5
    assert Request("r", [1], SamplingParams(seed=0), max_model_len=10, seed=5).seed == 0


def test_remaining_tokens_count_those_in_flight():
    request = make()
    assert request.num_remaining_tokens == 3
    request.num_computed_tokens = 3
    request.num_inflight_tokens = 1
    assert request.num_remaining_tokens == 1


@pytest.mark.parametrize(
    ("params", "output", "ending"),
    [
        ({}, [7], None),
        ({"eos": (7, 8)}, [8], ("stop", None)),
        ({"eos": (7,), "ignore_eos": True}, [7], None),
        ({"stop_token_ids": [7]}, [7], ("stop", 7)),
        ({"eos": (7,), "stop_token_ids": [7]}, [7], ("stop", None)),
        ({"eos": (7,), "min_tokens": 2}, [7], None),
        ({"eos": (7,), "min_tokens": 2}, [7, 7], ("stop", None)),
        ({"max_tokens": 2}, [5, 5], ("length", None)),
        ({"max_tokens": 2, "eos": (7,)}, [5, 7], ("stop", None)),
        ({"max_tokens": 2, "min_tokens": 2, "ignore_eos": True}, [7, 7], ("length", None)),
    ],
)
def test_ending(params, output, ending):
    request = make(**{"max_tokens": 5, **params})
    request.all_token_ids += output
    assert request.ending() == ending
