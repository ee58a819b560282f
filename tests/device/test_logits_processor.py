"""Users' processors: which are refused when they are registered, and what they do."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import NONE_ALLOWED
from jaxpaged.device.logits_processor import LogitsProcessor, check_processors
from jaxpaged.errors import ConfigError
from tests.device.sampling_cases import HEAD, MAX_LEN, PROCESSORS, ROWS, make_request, random_logits, sample_rows


def test_good_ones_are_taken():
    assert check_processors(list(PROCESSORS), HEAD, MAX_LEN) == PROCESSORS
    assert check_processors([], HEAD, MAX_LEN) == ()


def _same(logits, context):
    return logits


def _needs_an_argument(logits, context):
    return logits + context.arguments["missing"]


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        ([_same], "not a LogitsProcessor"),
        ([LogitsProcessor("", _same)], "with a name"),
        ([LogitsProcessor("a", _same), LogitsProcessor("a", _same)], "two logits processors are called 'a'"),
        ([LogitsProcessor("short", lambda x, c: x[1:])], rf"'short' makes float32\[{HEAD - 1}\] of float32\[{HEAD}\]"),
        ([LogitsProcessor("half", lambda x, c: x.astype(jnp.bfloat16))], "'half' makes bfloat16"),
        ([LogitsProcessor("none", lambda x, c: None)], "makes None"),  # pyright: ignore[reportArgumentType]
        ([LogitsProcessor("if", lambda x, c: x if x[0] > 0 else -x)], "'if' cannot be traced"),
        ([LogitsProcessor("lacks", _needs_an_argument)], "'lacks' cannot be traced"),
        ([LogitsProcessor("nan", _same, {"x": float("nan")})], "default x=nan"),
        ([LogitsProcessor("text", _same, {"x": "1"})], "default x='1'"),  # pyright: ignore[reportArgumentType]
        ([LogitsProcessor("list", _same, {"x": [1.0]})], "default x="),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_ones_are_refused_by_name(processors, message):
    with pytest.raises(ConfigError, match=message):
        check_processors(processors, HEAD, MAX_LEN)


def with_processors(**asked) -> SamplingParams:
    return SamplingParams(temperature=0, logits_processors=asked)


def test_it_sees_its_own_sequence_and_changes_nobody_else():
    logits = random_logits()
    order = np.argsort(-logits[:190])
    first, second = int(order[0]), int(order[1])
    plain = make_request(output=[first])
    avoids = make_request(with_processors(avoid_last={"amount": 50}), output=[first])
    starts = make_request(with_processors(avoid_last={"amount": 50}), prompt=[4, first])
    other = make_request(with_processors(avoid_last={"amount": 50}), output=[second])
    assert sample_rows(logits, plain, avoids, starts, other).tokens.tolist() == [first, second, second, first]


def test_arguments_and_counts_reach_it():
    logits = np.zeros(HEAD)
    logits[9] = 5
    request = make_request(with_processors(favour_two={"by": 3, "ids": (6, 4)}), output=[9])
    assert sample_rows(logits, request).tokens[0] == 9
    request.all_token_ids.append(9)
    assert sample_rows(logits, request).tokens[0] == 4
    default = make_request(with_processors(favour_two={"by": 3}), output=[9, 9])
    assert sample_rows(logits, default, request).tokens[:2].tolist() == [3, 4]


def test_several_run_in_the_order_of_registration():
    logits = np.zeros(HEAD)
    logits[9] = 2
    both = make_request(with_processors(favour_two={"by": 3}, unban={}), output=[9])
    assert sample_rows(logits, both).tokens[0] == 0, "the last one made all equal"


def test_what_is_banned_stays_banned():
    logits = random_logits()
    asks = SamplingParams(temperature=0, logits_processors={"unban": {}}, allowed_token_ids=[150, 120])
    assert sample_rows(logits, make_request(asks)).tokens[0] == 120
    flat = SamplingParams(logits_processors={"unban": {}})
    tokens = {int(sample_rows(logits, make_request(flat, seed=s)).tokens[0]) for s in range(60)}
    assert max(tokens) < 190, "the head's padding was produced"


def test_nan_ends_its_row_alone():
    requests = [make_request(with_processors(nan={})), make_request(), make_request(SamplingParams(), seed=1)]
    logits = random_logits()
    alone = [int(sample_rows(logits, request).tokens[0]) for request in requests]
    assert alone[0] == NONE_ALLOWED and min(alone[1:]) >= 0
    assert sample_rows(logits, *requests).tokens[:3].tolist() == alone


def test_rows_do_not_share_what_a_processor_keeps_of_one():
    """A function that reduces over its argument reduces over one row only: both together have a mean above zero."""
    logits = np.stack([random_logits(i) + shift for i, shift in enumerate((50, -20, 50, -20))])
    requests = [make_request(with_processors(by_mean={})) for _ in range(ROWS)]
    assert sample_rows(logits, *requests).tokens.tolist() == [1, 2, 1, 2]
