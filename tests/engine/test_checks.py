"""What one engine refuses, by name: cases B16, B18, B20, B21, B22, S01 and their kinds."""

from __future__ import annotations

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.checks import check_params, check_scheduling, checked_prompt
from jaxpaged.errors import InvalidRequestError, RequestTooLargeError

VOCAB = 100
CONFIG = EngineConfig(max_model_len=16, max_logprobs=8)
ALL = EngineConfig(max_model_len=16, max_logprobs=-1)


def check(config: EngineConfig = CONFIG, bad_word_ids=(), **params) -> None:
    check_params(SamplingParams(**params), config, VOCAB, bad_word_ids)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("logit_bias", {"logit_bias": {1: 5.0, 191222: -100.0}}),
        ("allowed_token_ids", {"allowed_token_ids": [1, 191222]}),
        ("logprob_token_ids", {"logprob_token_ids": [1, 191222], "logprobs": 0}),
        ("stop_token_ids", {"stop_token_ids": [1, 191222]}),
        ("bad_words", {"bad_words": ["x"], "bad_word_ids": [[1], [2, 191222]]}),
    ],
)
def test_ids_outside_the_vocabulary_are_named(name, params) -> None:
    """B21, B22: `VOCAB` itself is outside too."""
    for outside in (191222, VOCAB):
        given = {key: _replaced(value, outside) for key, value in params.items()}
        with pytest.raises(InvalidRequestError, match=f"{name} holds {outside}") as caught:
            check(**given)
        assert caught.value.param == name
    check(**{key: _replaced(value, VOCAB - 1) for key, value in params.items()})


def _replaced(value, token):
    if isinstance(value, dict):
        return {_replaced(k, token): v for k, v in value.items()}
    if isinstance(value, list):
        return [_replaced(v, token) for v in value]
    return token if value == 191222 else value


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_the_engine_gives(name) -> None:
    check(**{name: 8}), check(**{name: 0}), check(ALL, **{name: -1}), check(ALL, **{name: VOCAB})
    for config, asked in ((CONFIG, 9), (CONFIG, -1), (ALL, VOCAB + 1)):
        with pytest.raises(InvalidRequestError, match=rf"{name}={asked}\b.*max_logprobs") as caught:
            check(config, **{name: asked})
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("width", "num_stops", "vocab_size", "refused"),
    [
        (64, 64, 64, ""),  # all of the vocabulary is looked at
        (64, 0, 63, "beam_width"),
        (48, 64, 1000, ""),
        (49, 64, 1000, "stop_token_ids"),
        (64, 48, 1000, ""),
        (64, 49, 1000, "stop_token_ids"),
    ],
)
def test_beams_need_candidates(width, num_stops, vocab_size, refused) -> None:
    params = SamplingParams(
        use_beam_search=True, temperature=0, beam_width=width, stop_token_ids=list(range(num_stops))
    )
    if not refused:
        check_params(params, CONFIG, vocab_size)
        return
    with pytest.raises(InvalidRequestError, match=f"beam_width={width}") as caught:
        check_params(params, CONFIG, vocab_size)
    assert caught.value.param == refused


HEEDS = EngineConfig(scheduling_policy="priority")


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 1.5, True, None, "1"])
def test_a_priority_is_a_32_bit_integer(priority) -> None:
    with pytest.raises(InvalidRequestError, match="priority") as caught:
        check_scheduling(priority, None, HEEDS)
    assert caught.value.param == "priority"
    check_scheduling(2**31 - 1, None, HEEDS), check_scheduling(-(2**31), "salt", HEEDS)


@pytest.mark.parametrize("salt", ["", 5, b"x"])
def test_an_empty_salt_is_refused(salt) -> None:
    """S01: it would be everybody's."""
    with pytest.raises(InvalidRequestError, match="cache_salt") as caught:
        check_scheduling(0, salt, HEEDS)
    assert caught.value.param == "cache_salt"


PROMPT = list(range(30))


@pytest.mark.parametrize(
    ("keep", "max_tokens", "kept"),
    [
        (None, 1, None),
        (5, 4, 5),
        (15, 16, 15),
        (16, 1, None),
        (100, 1, None),
        (-1, 6, 10),
        (-1, 1, 15),
        (-1, None, 15),
        (-1, 15, 1),
        (-1, 1000, 1),
        (-1, 0, 15),
    ],
)
def test_the_last_prompt_tokens_are_kept(keep, max_tokens, kept) -> None:
    """None: too long."""
    scoring = {"prompt_logprobs": 0} if max_tokens == 0 else {}
    params = SamplingParams(truncate_prompt_tokens=keep, max_tokens=max_tokens, **scoring)
    if kept is None:
        with pytest.raises(RequestTooLargeError, match=rf"{min(30, keep or 30)}.*16"):
            checked_prompt(PROMPT, params, CONFIG, VOCAB)
    else:
        assert checked_prompt(PROMPT, params, CONFIG, VOCAB) == PROMPT[-kept:]
    assert checked_prompt([7], params, CONFIG, VOCAB) == [7]


def test_what_is_cut_off_is_checked_too() -> None:
    """B20."""
    with pytest.raises(InvalidRequestError, match="100"):
        checked_prompt([VOCAB, 1, 2], SamplingParams(truncate_prompt_tokens=2), CONFIG, VOCAB)


def test_a_priority_that_nothing_heeds_is_refused() -> None:
    for config in (EngineConfig(), EngineConfig(scheduling_policy="spf")):
        check_scheduling(0, None, config)
        with pytest.raises(InvalidRequestError, match="priority=3 is not heeded"):
            check_scheduling(3, None, config)
    check_scheduling(3, None, EngineConfig(scheduling_key=lambda request: request.priority))
