"""What front and cores say to each other survives the way there; what is no message does not."""

from __future__ import annotations

import inspect
import pickle

import msgspec
import numpy as np
import pytest

from jaxpaged import errors
from jaxpaged.config import EngineConfig
from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputs
from jaxpaged.core.step import RequestUpdate, TokenLogprobs
from jaxpaged.engine import messages
from jaxpaged.engine.engine_facts import EngineFacts
from jaxpaged.engine.messages import (
    Abort,
    AddRequest,
    Answer,
    Call,
    Died,
    Failure,
    Progress,
    Ready,
    Refused,
    StartFailed,
    Updates,
)
from jaxpaged.engine.programs import Programs
from jaxpaged.engine.stats import EngineStats

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2.5, None, "x"]}}}
EVERYTHING = SamplingParams(
    n=2, best_of=3, temperature=0.5, top_k=5, top_p=0.25, min_p=0.125, seed=-(2**63), presence_penalty=1,
    frequency_penalty=-1, repetition_penalty=1.5, logit_bias={3: -100.0, 4: 1}, allowed_token_ids=[1, 2],
    bad_words=["a b"], stop=["x", "🔥"], stop_token_ids=[7], include_stop_str_in_output=True, ignore_eos=True,
    min_tokens=1, max_tokens=None, timeout=1.5, logprobs=-1, prompt_logprobs=2, logprob_token_ids=[9],
    logprobs_mode="processed_logprobs", structured_outputs=StructuredOutputs(json=SCHEMA),
    logits_processors={"name": {"a": 1, "b": [1.5, 2.0]}}, detokenize=True, skip_special_tokens=False,
    shown_special_ids=[4], spaces_between_special_tokens=False, truncate_prompt_tokens=-1,
    output_kind="final",
)  # fmt: skip
BEAMS = SamplingParams(n=2, use_beam_search=True, beam_width=3, length_penalty=0.5, early_stopping="never")
BROKEN = SamplingParams(structured_outputs=StructuredOutputs(json={1: 2}))  # JSON has no such keys
LOGPROBS = TokenLogprobs(5, -float("inf"), 1, [5, 6], [-0.1, -2.0], [1, 9])
FAILURE = Failure("InvalidRequestError", "n=0 is too small", "n")

TO_CORE = [
    AddRequest("id#1", [1, 2, 3], EVERYTHING, 12.5, PoolingParams(dimensions=3), "salt", -5, [[1, 2], [3]]),
    AddRequest("id#1", list(range(5000)), BEAMS, 12.5),
    Abort("🔥"),
    Abort("id", 3),
    Call(7, "start_profile", ["/tmp/x"]),
]
FROM_CORE = [
    Progress("load", 2**40, 2**41),
    Ready(
        EngineFacts(EngineConfig("x", max_model_len=5, swap_space=0.5), 100, 64, (2, 3), "last"),
        Programs(7, {"forward": [1, 2]}, {}),
    ),
    StartFailed(FAILURE),
    Updates([], EngineStats(num_running=3, schedule_seconds=0.5), 12.5),
    Updates(
        [
            RequestUpdate("id#1", [5, 6], [LOGPROBS], "stop", "🔥", 4, 2, 0.5, 1.5, [LOGPROBS], b"\0\1"),
            RequestUpdate("id#2", [], finish_reason="stop", stop_reason=7),
        ],
        EngineStats(),
        12.5,
    ),
    Refused("id#1", FAILURE),
    Answer(3),
    Answer(3, "text"),
    Answer(3, failure=FAILURE),
    Died("RuntimeError('device lost')"),
]


@pytest.mark.parametrize("message", TO_CORE, ids=lambda m: type(m).__name__)
def test_messages_to_a_core_arrive_as_they_were(message) -> None:
    assert messages.decode_to_core(messages.encode(message)) == message
    with pytest.raises(msgspec.DecodeError):
        messages.decode_from_core(messages.encode(message))


@pytest.mark.parametrize("message", FROM_CORE, ids=lambda m: type(m).__name__)
def test_messages_from_a_core_arrive_as_they_were(message) -> None:
    assert messages.decode_from_core(messages.encode(message)) == message
    with pytest.raises(msgspec.DecodeError):
        messages.decode_to_core(messages.encode(message))


def test_every_parameter_is_among_those_that_were_sent() -> None:
    default = SamplingParams()
    same = [
        n for n in default.__struct_fields__ if all(getattr(p, n) == getattr(default, n) for p in (EVERYTHING, BEAMS))
    ]
    assert same == ["detokenize"]  # which the stop strings need


def test_numpy_numbers_become_plain_ones() -> None:
    message = AddRequest("id", [np.int64(5)], SamplingParams(temperature=np.float64(0.5)), 0.0)
    told = messages.decode_to_core(messages.encode(message))
    assert isinstance(told, AddRequest) and (told.prompt_token_ids, told.params.temperature) == ([5], 0.5)


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"\x90", b"x" * 100, pickle.dumps({"a": print}), b"\xff" * 8, b"\x93\xa5Abort\x01\x02",
     b"\x92\xa5Abort\xa1\xff", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000],
)  # fmt: skip
def test_what_is_no_message_is_refused(frame) -> None:
    for decode in (messages.decode_to_core, messages.decode_from_core):
        with pytest.raises((ValueError, RecursionError)):
            decode(frame)


@pytest.mark.parametrize(
    ("frame", "request_id"),
    [
        (msgspec.msgpack.encode(["AddRequest", "🔥", "wrong", {}]), "🔥"),
        (messages.encode(AddRequest("id", [1], BROKEN, 0.0)), "id"),
        (msgspec.msgpack.encode(["AddRequest", 5]), None),
        (messages.encode(AddRequest("id", [1], EVERYTHING, 0.0))[:-3], None),
        (messages.encode(Abort("id")), None),
        (b"", None),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_read_is_known_by_its_beginning(frame, request_id) -> None:
    assert messages.broken_request(frame) == request_id


@pytest.mark.parametrize(
    "kind", [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.JaxPagedError)]
)
def test_our_errors_keep_their_class_message_and_parameter(kind) -> None:
    original = kind("n=0", param="n") if issubclass(kind, errors.InvalidRequestError) else kind("n=0")
    copy = Failure.of(original).exception()
    assert (
        type(copy) is kind and str(copy) == "n=0" and getattr(copy, "param", None) == getattr(original, "param", None)
    )


@pytest.mark.parametrize("name", ["", "KeyError", "Sequence", "__builtins__", "no_such"])
def test_no_class_but_ours_is_ever_made(name) -> None:
    assert type(Failure(name, "x").exception()) is RuntimeError
    assert type(Failure.of(KeyError("a")).exception()) is RuntimeError
