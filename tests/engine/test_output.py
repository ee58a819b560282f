"""Updates to outputs: kinds, samples, cuts at stop strings, logprobs. Cases B02, B04, B10, B11, B18, B35, B43."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import RequestUpdate
from jaxpaged.engine.output import logprob_arrays
from jaxpaged.engine.output_processor import OutputProcessor
from tests.engine.outputs import EOS, MODES, TOKENIZER, engine_for, joined, run
from tests.fake_engine import FakeEngine


@pytest.mark.parametrize("tokens_per_step", [1, 2, 5])
@pytest.mark.parametrize(
    ("script", "params"),
    [
        (TOKENIZER.byte_ids("x🔥ď"), {"max_tokens": 7}),
        (TOKENIZER.byte_ids("🔥"), {"max_tokens": 2}),  # B02
        ([*TOKENIZER.byte_ids("ab"), EOS], {}),
        (TOKENIZER.ids("The", "Ġquick", "Ġbr", "own", "Ġfox"), {"stop": ["own fox"]}),
        (TOKENIZER.ids("Ġha"), {"stop": [" ha ha ha"], "logprobs": 2}),  # B10
        (TOKENIZER.ids("The", "Ġbr", "own"), {"stop": ["own fox"], "max_tokens": 3, "logprobs": 0}),
    ],
)
def test_all_modes_and_step_sizes_agree(script, params, tokens_per_step) -> None:
    wholes = []
    for mode in MODES:
        engine = engine_for(script, tokens_per_step=tokens_per_step)
        engine.tops = [5, 6]
        outputs = run(engine, mode, **params)
        wholes.append(joined(outputs) if mode == "delta" else outputs[-1])
        assert mode != "final" or len(outputs) == 1
    (reference,) = run(engine_for_tops(script), "final", **params)
    for whole in wholes:
        assert whole.outputs == reference.outputs
        assert whole.prompt_token_ids == [5, 6, 7]
        assert whole.metrics.num_output_tokens == len(reference.token_ids)


def engine_for_tops(script: list[int]) -> FakeEngine:
    engine = engine_for(script)
    engine.tops = [5, 6]
    return engine


def test_cumulative_outputs_grow_and_deltas_are_their_differences() -> None:
    script = TOKENIZER.ids("The", "Ġquick", "Ġfox")
    cumulative = run(engine_for(script), "cumulative", max_tokens=3)
    assert [o.text for o in cumulative] == ["The", "The quick", "The quick fox"]
    assert [o.token_ids for o in cumulative] == [script[:1], script[:2], script]
    delta = run(engine_for(script), "delta", max_tokens=3)
    assert [o.text for o in delta] == ["The", " quick", " fox"]
    assert [o.token_ids for o in delta] == [[t] for t in script]
    assert delta[-1].finish_reason == "length"


def test_nothing_is_sent_for_half_a_character() -> None:
    """B01: steps that release nothing give no output."""
    outputs = run(engine_for(TOKENIZER.byte_ids("🔥a")), "delta", max_tokens=5)
    assert [(o.text, len(o.token_ids)) for o in outputs] == [("🔥", 4), ("a", 1)]


def test_an_unfinished_character_is_flushed_in_every_mode() -> None:
    """B02."""
    for mode in MODES:
        outputs = run(engine_for(TOKENIZER.byte_ids("🔥")), mode, max_tokens=2)
        assert outputs[-1].finish_reason == "length"
        assert "".join(o.text for o in outputs) == "\ufffd"
        assert sum(len(o.token_ids) for o in outputs) == 2


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 4, 5])
def test_text_tokens_and_logprobs_are_cut_at_the_same_token(tokens_per_step) -> None:
    """B10: the cut includes the token that completes the stop string; the engine is told to abort."""
    engine = engine_for(TOKENIZER.ids("Ġha"), tokens_per_step=tokens_per_step)
    engine.tops = [5, 6]
    (output,) = run(engine, "final", stop=[" ha ha ha"], logprobs=2, max_tokens=50)
    assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", " ha ha ha")
    assert len(output.token_ids) == len(output.logprobs) == output.metrics.num_output_tokens == 3
    assert output.outputs[0].cumulative_logprob == pytest.approx(-1.5)
    assert engine.aborted == ["r"]
    assert engine.num_free == engine.num_blocks


def test_a_stop_string_in_the_last_token_needs_no_abort() -> None:
    engine = engine_for(TOKENIZER.ids("The", "Ġfox"))
    (output,) = run(engine, "final", stop=["fox"], max_tokens=2)
    assert (output.text, output.finish_reason, output.stop_reason) == ("The ", "stop", "fox")
    assert engine.aborted == []


def test_updates_after_the_end_are_ignored() -> None:
    """The engine is a step ahead when a stop string is found."""
    engine, processor = engine_for(TOKENIZER.byte_ids("ab")), OutputProcessor(TOKENIZER)
    request = engine.make_request("r", [5], SamplingParams(stop="a"))
    engine.add_request(request)
    processor.add(request)
    first, second = engine.step(), engine.step()
    outputs, to_abort, _ = processor.process(first)
    assert (outputs[0].finished, to_abort) == (True, [("r", 0)])
    assert processor.process(second)[:2] == ([], [])


def test_tokens_and_logprobs_are_sent_with_their_text() -> None:
    """B11."""
    script = TOKENIZER.ids("The", "Ġbr", "own", "Ġdog")
    outputs = run(engine_for(script), "delta", stop=["own fox"], max_tokens=4, logprobs=0)
    assert [o.text for o in outputs] == ["The", " br", "own dog"]
    for output in outputs:
        assert "".join(p.token for p in output.logprobs) == output.text
        assert [p.token_id for p in output.logprobs] == output.token_ids
    assert [p.text_offset for p in joined(outputs).logprobs] == [0, 3, 6, 9]


def test_the_token_that_ends_a_text_is_no_part_of_it() -> None:
    newline = TOKENIZER.byte_ids("\n")[0]
    script = [*TOKENIZER.byte_ids("a"), newline]
    (output,) = run(engine_for(script), "final", stop_token_ids=[newline])
    assert (output.text, output.stop_reason, output.token_ids) == ("a", newline, script)
    options = {"stop_token_ids": [newline], "include_stop_str_in_output": True}
    (output,) = run(engine_for(script), "final", **options)
    assert output.text == "a\n"
    (output,) = run(engine_for([script[0], EOS]), "final", skip_special_tokens=False)
    assert (output.text, output.stop_reason, output.finish_reason) == ("a", None, "stop")
    assert output.token_ids == [script[0], EOS]


def test_partial_byte_tokens_keep_their_bytes_in_logprobs() -> None:
    """B04."""
    script = TOKENIZER.byte_ids("🔥")
    engine = engine_for(script)
    engine.tops = [*script, TOKENIZER.byte_ids("a")[0]]
    (output,) = run(engine, "final", max_tokens=4, logprobs=5)
    assert b"".join(p.bytes for p in output.logprobs).decode() == output.text == "🔥"
    for position in output.logprobs:
        assert [t.bytes for t in position.top] == [b"\xf0", b"\x9f", b"\x94", b"\xa5", b"a"]
        assert [t.token for t in position.top] == ["\ufffd"] * 4 + ["a"]
        assert [t.rank for t in position.top] == [1, 2, 3, 4, 5]


def test_logprobs_as_arrays() -> None:
    engine = engine_for(TOKENIZER.byte_ids("ab"))
    engine.tops, engine.sampled_logprob = [9, 8, 7], -math.inf
    (output,) = run(engine, "final", max_tokens=2, logprobs=3)
    arrays = logprob_arrays(output.logprobs)
    np.testing.assert_array_equal(arrays.token_ids, TOKENIZER.byte_ids("ab"))
    np.testing.assert_array_equal(arrays.top_ids, [[9, 8, 7]] * 2)
    np.testing.assert_array_equal(arrays.top_logprobs, [[-1, -2, -3]] * 2)
    assert arrays.ranks.tolist() == [4, 4] and np.isneginf(arrays.logprobs).all()
    assert [a.shape for a in logprob_arrays([])] == [(0,), (0,), (0,), (0, 0), (0, 0), (0, 0)]


def test_without_logprobs_there_are_none() -> None:
    (output,) = run(engine_for([5]), "final", max_tokens=2)
    assert output.logprobs is None and output.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
def test_without_detokenizing_there_are_tokens_only(tokenizer) -> None:
    outputs = run(engine_for([5, 6]), "delta", tokenizer=tokenizer, detokenize=False, max_tokens=3)
    assert [(o.text, o.token_ids) for o in outputs] == [("", [5]), ("", [6]), ("", [5])]


def test_times_and_cached_tokens() -> None:
    engine = engine_for([5])
    engine.delay = 0.01
    metrics = run(engine, "final", max_tokens=3)[0].metrics
    assert metrics.arrival_time < metrics.first_token_time < metrics.last_token_time == metrics.finished_time
    assert metrics.time_to_first_token >= 0.01
    assert 0 < metrics.tokens_per_second <= 100
    assert run(engine_for([5]), "final", max_tokens=1)[0].num_cached_tokens == 2


def test_times_of_tokens_are_those_of_the_steps_that_made_them() -> None:
    """Not those of this process, which may be late; but what a client waits for ends here."""
    processor, arrival = OutputProcessor(None), time.monotonic() - 100
    processor.add(Request("r", [5], SamplingParams(output_kind="delta"), max_model_len=50, arrival_time=arrival))
    first = processor.process([RequestUpdate("r", [5], queued_time=1.0, scheduled_time=2.0)], 3.0)
    second = processor.process([RequestUpdate("r", [6], finish_reason="stop")], 5.0)
    assert second.tokens.inter_token_seconds == [2.0] and first.tokens.first_token_seconds[0] >= 100
    metrics = second.outputs[0].metrics
    assert (metrics.queued_time, metrics.scheduled_time) == (1.0, 2.0)
    assert (metrics.first_token_time, metrics.last_token_time) == (3.0, 5.0)
    assert metrics.finished_time is not None and metrics.finished_time >= arrival + 100


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
def test_metrics_of_an_output_are_as_of_then(kind) -> None:
    processor = OutputProcessor(None)
    processor.add(Request("r", [5], SamplingParams(n=2, output_kind=kind), max_model_len=50))
    updates = [RequestUpdate("r", [5]), RequestUpdate("r", [6], finish_reason="stop", index=1)]
    (one,) = processor.process(updates).outputs
    (two,) = processor.process([RequestUpdate("r", [7, 8], None, "length")]).outputs
    assert not one.finished and one.metrics.finished_time is None and one.metrics.num_output_tokens == 2
    assert two.finished and two.metrics.finished_time is not None and two.metrics.num_output_tokens == 4


def test_aborts_give_what_there_is() -> None:
    engine, processor = engine_for(TOKENIZER.ids("The", "own")), OutputProcessor(TOKENIZER)
    request = engine.make_request("r", [5, 6, 7], SamplingParams(stop=["own fox"], output_kind="delta"))
    engine.add_request(request)
    processor.add(request)
    processor.process(engine.step())
    processor.process(engine.step())
    output = processor.abort("r")
    assert output is not None
    assert (output.text, output.finish_reason, output.finished) == ("own", "abort", True)
    assert output.num_cached_tokens == 2
    assert processor.abort("r") is None
    assert processor.process([RequestUpdate("r", [5])])[:2] == ([], [])
