"""Wide options: what is packed, what is refused, where it lands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.device.options import (
    MAX_BAD_WORD_TOKENS,
    Options,
    admit_options,
    empty_options,
    mask_words,
    options_size,
    pack_options,
)
from jaxpaged.device.slots import NO_TOKEN
from jaxpaged.errors import InvalidRequestError
from tests.device.sampling_cases import HEAD, PROCESSORS, make_request


def admitted(options: Options, slot: int, packed: np.ndarray | None) -> Options:
    assert packed is not None and packed.shape == (options_size(options),) and packed.dtype == np.int32
    return jax.jit(admit_options)(options, jnp.int32(slot), packed)


def test_a_plain_request_packs_nothing():
    params = SamplingParams(top_k=5, presence_penalty=1, min_tokens=2, logprobs=3, logit_bias={}, logits_processors={})
    assert pack_options(make_request(params), HEAD, PROCESSORS) is None


def test_everything_lands_in_its_slot():
    params = SamplingParams(
        logit_bias={199: -1.5, 0: 2.0},
        allowed_token_ids=[0, 31, 32, 199],
        logprobs=1,
        logprob_token_ids=[9, 4],
        logits_processors={"favour_two": {"by": 0.5}},
    )
    request = make_request(params, bad_word_ids=[[5], [6, 7, 8], [9, 9]])
    options = admitted(empty_options(3, HEAD, PROCESSORS), 1, pack_options(request, HEAD, PROCESSORS))
    assert options.bias_ids[1, :3].tolist() == [199, 0, NO_TOKEN]
    assert options.bias_values[1, :3].tolist() == [-1.5, 2.0, 0]
    words = np.asarray(options.allowed[1]).view(np.uint32)
    assert {32 * w + i for w in range(len(words)) for i in range(32) if words[w] >> i & 1} == {0, 31, 32, 199}
    assert options.bad_tokens[1, :7].tolist() == [5, 6, 7, 8, 9, 9, NO_TOKEN]
    assert options.bad_left[1, :7].tolist() == [0, 2, 1, 0, 1, 0, 0]
    assert options.logprob_ids[1, :3].tolist() == [9, 4, NO_TOKEN]
    assert options.applies[1].tolist() == [0, 1, 0, 0, 0]
    assert options.arguments[1].tolist() == [0, 3.0, 5.0, 0.5]
    others = jax.tree.map(lambda x: np.delete(np.asarray(x), 1, 0), options)
    jax.tree.map(np.testing.assert_array_equal, others, empty_options(2, HEAD, PROCESSORS))


def test_nothing_is_left_of_the_request_before():
    full = make_request(
        SamplingParams(logit_bias=dict.fromkeys(range(100), 1.0), allowed_token_ids=[1], logits_processors={"nan": {}}),
        bad_word_ids=[[1, 2]] * 9,
    )
    small = make_request(SamplingParams(logit_bias={3: 1.0}))
    empty = empty_options(2, HEAD, PROCESSORS)
    used = admitted(empty, 0, pack_options(full, HEAD, PROCESSORS))
    again = admitted(used, 0, pack_options(small, HEAD, PROCESSORS))
    fresh = admitted(empty, 0, pack_options(small, HEAD, PROCESSORS))
    jax.tree.map(np.testing.assert_array_equal, again, fresh)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([[1] * (MAX_BAD_WORD_TOKENS + 1)], "1025 tokens"),
        ([[1] * 8] * 129, "1032 tokens"),
        ([[1], []], "without tokens"),
    ],
)
def test_bad_words_that_do_not_fit_are_refused(words, message):
    with pytest.raises(InvalidRequestError, match=message) as error:
        pack_options(make_request(bad_word_ids=words), HEAD)
    assert error.value.param == "bad_words"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"nobody": {}}, "no logits processor is called 'nobody'"),
        ({"favour_two": {}}, "needs 'by'"),
        ({"favour_two": {"by": None}}, "needs 'by'"),
        ({"avoid_last": {"much": 1}}, "takes no 'much'"),
        ({"avoid_last": {"amount": float("nan")}}, "amount=nan is not a finite number"),
        ({"avoid_last": {"amount": float("inf")}}, "not a finite number"),
        ({"avoid_last": {"amount": 1e39}}, "not a finite number"),
        ({"avoid_last": {"amount": 10**400}}, "not a finite number"),
        ({"avoid_last": {"amount": True}}, "not a finite number"),
        ({"avoid_last": {"amount": "1"}}, "not a finite number"),
        ({"avoid_last": {"amount": [1.0]}}, "not a finite number"),
        ({"favour_two": {"by": 1, "ids": [1.0]}}, "not 2 finite numbers"),
        ({"favour_two": {"by": 1, "ids": 1.0}}, "not 2 finite numbers"),
        ({"favour_two": {"by": 1, "ids": [1, float("nan")]}}, "not 2 finite numbers"),
    ],
    ids=str,
)
def test_wrong_processor_arguments_are_refused_by_name(asked, message):
    with pytest.raises(InvalidRequestError, match=message) as error:
        pack_options(make_request(SamplingParams(logits_processors=asked)), HEAD, PROCESSORS)
    assert error.value.param == "logits_processors"


def test_admission_is_in_place():
    options = jax.eval_shape(lambda: empty_options(64, 128_256, PROCESSORS))
    packed = jax.ShapeDtypeStruct((options_size(options),), jnp.int32)
    slot = jax.ShapeDtypeStruct((), jnp.int32)
    analysis = jax.jit(admit_options, donate_argnums=0).lower(options, slot, packed).compile().memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes == sum(x.size * 4 for x in options)
    assert analysis.temp_size_in_bytes < 4 * 65 * mask_words(128_256)
