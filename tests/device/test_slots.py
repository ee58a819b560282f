"""What an admission leaves on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import Admission
from jaxpaged.device.slots import NO_TOKEN, Feature, admission_size, admit, empty_slots, features, pack_admission
from tests.device.sampling_cases import NoGrammar

MAX_LEN, PAGES = 32, 4
TOP = Feature.LOGPROBS | Feature.TOP_LOGPROBS


def make_request(params: SamplingParams, **fields) -> Request:
    return Request("r", range(5), params, max_model_len=MAX_LEN, eos_token_ids=(1, 2), **fields)


def admit_into(slots, slot: int, request: Request, blocks=(3, 1)):
    return jax.jit(admit)(
        slots, pack_admission(Admission(slot, request, list(blocks)), features(request), MAX_LEN, PAGES)
    )


def test_admission_reaches_its_slot_whole():
    params = SamplingParams(
        temperature=0.7,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=-1,
        min_tokens=2,
        stop_token_ids=[9],
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        repetition_penalty=1.5,
    )
    request = make_request(params)
    request.index = 4
    request.all_token_ids += [30, 31]
    slots = admit_into(empty_slots(4, MAX_LEN, PAGES), 2, request)
    assert slots.history[2, :8].tolist() == [0, 1, 2, 3, 4, 30, 31, 0]
    assert slots.block_table[2].tolist() == [3, 1, 0, 0]
    assert slots.stop_ids[2, :4].tolist() == [1, 2, 9, NO_TOKEN]
    expected = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "top_k": 3, "min_total_tokens": 7}
    expected |= {"seed_high": -1, "seed_low": -1, "num_prompt_tokens": 5, "sample_index": 4}
    expected |= {"presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 1.5}
    expected |= {"features": int(features(request))}
    for name, value in expected.items():
        assert slots.column(name, jnp.array([2]))[0] == pytest.approx(value), name


def test_admission_leaves_other_slots_alone_and_nothing_of_the_one_before():
    first = make_request(SamplingParams(stop_token_ids=[9], min_tokens=3))
    first.all_token_ids += [9] * 20
    slots = empty_slots(2, MAX_LEN, PAGES)
    before = jax.tree.map(np.asarray, slots)
    slots = admit_into(slots, 1, first)
    for old, new in zip(before, slots, strict=True):
        np.testing.assert_array_equal(np.delete(old, 1, 0), np.delete(np.asarray(new), 1, 0))
    plain = make_request(SamplingParams(temperature=0))
    again, fresh = admit_into(slots, 1, plain), admit_into(empty_slots(2, MAX_LEN, PAGES), 1, plain)
    jax.tree.map(np.testing.assert_array_equal, again, fresh)


def test_padding_uses_no_feature():
    slots = empty_slots(3, MAX_LEN, PAGES)
    assert slots.column("features", jnp.arange(4)).tolist() == [0] * 4


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, Feature(0)),
        ({"top_k": 1, "top_p": 0.5}, Feature(0)),
        ({}, Feature.RANDOM),
        ({"top_k": 5, "top_p": 0.5}, Feature.RANDOM | Feature.TOP_K | Feature.TOP_P),
        ({"temperature": 0, "min_tokens": 1}, Feature.MIN_TOKENS),
        ({"temperature": 0, "presence_penalty": 0.1}, Feature.PENALTIES),
        ({"temperature": 0, "frequency_penalty": -0.1}, Feature.PENALTIES),
        ({"temperature": 0, "repetition_penalty": 0.9}, Feature.PENALTIES),
        ({"temperature": 0, "logit_bias": {}}, Feature(0)),
        ({"temperature": 0, "logit_bias": {3: 0.0}}, Feature.LOGIT_BIAS),
        ({"temperature": 0, "allowed_token_ids": [3]}, Feature.ALLOWED_IDS),
        ({"temperature": 0, "logits_processors": {"a": {}}}, Feature.PROCESSORS),
        ({"temperature": 0, "logprobs": 0}, Feature.LOGPROBS),
        ({"temperature": 0, "logprobs_mode": "processed_logprobs"}, Feature(0)),
        ({"temperature": 0, "logprobs": 1, "logprobs_mode": "raw_logprobs"}, TOP),
        ({"temperature": 0, "logprobs": 1, "logprob_token_ids": [1]}, Feature.LOGPROBS | Feature.LOGPROB_IDS),
        ({"best_of": 2}, Feature.RANDOM | Feature.LOGPROBS),
    ],
    ids=str,
)
def test_features_of_parameters(fields, expected):
    assert features(make_request(SamplingParams(**fields))) == expected


def test_features_of_what_texts_became():
    greedy = SamplingParams(temperature=0)
    assert features(make_request(greedy, bad_word_ids=[[1]])) == Feature.BAD_WORDS
    assert features(make_request(greedy, grammar=NoGrammar())) == Feature.GRAMMAR


def test_the_engine_says_which_logprobs_where_the_request_does_not():
    asked = make_request(SamplingParams(temperature=0, logprobs=1))
    assert features(asked, "processed_logprobs") == TOP | Feature.PROCESSED_LOGPROBS
    raw = make_request(SamplingParams(temperature=0, logprobs=1, logprobs_mode="raw_logprobs"))
    assert features(raw, "processed_logprobs") == TOP


def test_admission_copies_no_slots():
    slots = jax.eval_shape(lambda: empty_slots(16, 4096, 256))
    packed = jax.ShapeDtypeStruct((admission_size(slots),), jnp.int32)
    compiled = jax.jit(admit, donate_argnums=0).lower(slots, packed).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes == sum(x.size * 4 for x in slots)
    assert analysis.temp_size_in_bytes < 4 * 17 * 4096
