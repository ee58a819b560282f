import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.step_sizes import WORTH, StepSizes

SIZES = (32, 64, 96, 128, 256, 1024)


def padded(tokens):
    return next(n for n in SIZES if n >= tokens)


@given(st.integers(0, 1024), st.integers(0, 1100), st.sampled_from([0, 20, 200]))
def test_a_cut_fills_a_size_and_saves_what_the_next_step_costs(num_decoding, prompts, step_cost):
    wanted = num_decoding + prompts
    now = StepSizes(lambda: SIZES, step_cost).cut(wanted, num_decoding)
    if now is None:
        return
    assert now in SIZES and now < wanted < padded(wanted)
    rest = wanted - now
    whole = padded(wanted) + (num_decoding if num_decoding else 0)
    cut = now + padded(rest + num_decoding) + (0 if num_decoding else step_cost)
    assert whole - cut > WORTH * padded(wanted)


@pytest.mark.parametrize("sizes", [(32, 64), (32, 200, 256), (32, 64, 96, 128, 192, 257)])
def test_steps_of_decodes_are_never_cut_however_many_they_are(sizes):
    for step_cost in (0, 20, 200):
        assert all(StepSizes(lambda: sizes, step_cost).cut(n, n) is None for n in range(sizes[-1] + 1))


def test_a_lone_prompt_is_cut_only_if_that_is_worth_a_step():
    assert StepSizes(lambda: SIZES, 20).cut(140, 0) == 128
    assert StepSizes(lambda: SIZES, 200).cut(140, 0) is None
    assert StepSizes(lambda: SIZES, 200).cut(140, 5) == 128, "there will be a next step in any case"
    assert StepSizes(lambda: SIZES, 200).cut(300, 0) == 256


def test_nothing_is_cut_that_fits_or_nearly_so_or_is_less_or_more_than_all_sizes():
    sizes = StepSizes(lambda: SIZES)
    assert [sizes.cut(n, 4) for n in (1, 31, 32, 60, 64, 128, 250, 1024, 2000)] == [None] * 9
    assert StepSizes().cut(77, 3) is None


def test_sizes_that_come_later_count_from_then_on():
    """A server starts before all its programs are there: no step may need one that is not."""
    ready = [256]
    sizes = StepSizes(lambda: ready)
    assert (sizes.limit(300), sizes.limit(200), StepSizes().limit(300)) == (256, 200, 300)
    assert sizes.cut(140, 5) is None
    ready[:0] = [32, 128]
    assert sizes.cut(140, 5) == 128
