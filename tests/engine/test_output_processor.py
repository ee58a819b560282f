"""Several samples of a request, each with its end; faults and aborts."""

from __future__ import annotations

import time

import pytest

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import RequestUpdate
from jaxpaged.engine.output_processor import OutputProcessor
from tests import tiny_tokenizers
from tests.engine.outputs import EOS, MODES, TOKENIZER, engine_for, joined, run
from tests.fake_engine import FakeEngine


def by_index(texts: list[str]):
    """A script for each sample, then EOS."""
    return lambda request: [*TOKENIZER.byte_ids(texts[request.index]), EOS]


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_samples_are_told_apart_and_end_once_each(kind, tokens_per_step) -> None:
    """B35."""
    outputs = run(engine_for(by_index(["abcdef", "", "xy🔥"]), tokens_per_step=tokens_per_step), kind, n=3, logprobs=0)
    ends = [(c.index, c.finish_reason) for o in outputs for c in o.outputs if c.finish_reason]
    if kind == "delta":
        assert sorted(ends) == [(i, "stop") for i in range(3)]
        whole = joined(outputs)
    else:
        assert all([c.index for c in o.outputs] == [0, 1, 2] for o in outputs)
        whole = outputs[-1]
    assert [c.index for c in whole.outputs] == [0, 1, 2]
    assert [c.text for c in whole.outputs] == ["abcdef", "", "xy🔥"]
    assert [len(c.token_ids) for c in whole.outputs] == [len(c.logprobs) for c in whole.outputs] == [7, 1, 7]
    assert [c.cumulative_logprob for c in whole.outputs] == [-3.5, -0.5, -3.5]
    assert whole.metrics.num_output_tokens == 15


def test_deltas_carry_only_the_samples_that_moved() -> None:
    outputs = run(engine_for(by_index(["ab", "🔥", ""])), "delta", n=3)
    assert [[c.index for c in o.outputs] for o in outputs] == [[0, 2], [0], [0], [1], [1]]


def test_a_stop_string_ends_only_its_sample() -> None:
    engine = engine_for(by_index(["a.b", "abcd", "ab.d"]))
    (output,) = run(engine, "final", n=3, stop=".", max_tokens=10)
    assert [c.text for c in output.outputs] == ["a", "abcd", "ab"]
    assert [c.stop_reason for c in output.outputs] == [".", None, "."]
    assert [len(c.token_ids) for c in output.outputs] == [2, 5, 3]
    assert engine.aborted == ["r", "r"] and engine.num_free == engine.num_blocks


def scored(engine: FakeEngine, logprobs: list[float]) -> FakeEngine:
    """The same engine, with a logprob for the tokens of each sample."""
    real = engine._add_token

    def add_token(sample, update):
        engine.sampled_logprob = logprobs[sample.index]
        return real(sample, update)

    engine._add_token = add_token
    return engine


@pytest.mark.parametrize("kind", ["cumulative", "final"])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_the_best_samples_by_the_mean_of_their_tokens(kind, logprobs) -> None:
    """Not by the sum: then the short ones would win. Nothing is known before the end."""
    engine = scored(engine_for(by_index(["a", "bbbbbb", "cc", "dd"])), [-0.9, -0.2, -0.3, -0.8])
    (output,) = run(engine, kind, n=2, best_of=4, logprobs=logprobs)
    assert [(c.index, c.text) for c in output.outputs] == [(0, "bbbbbb"), (1, "cc")]
    assert output.metrics.num_output_tokens == 2 + 7 + 3 + 3
    for completion in output.outputs:
        assert (completion.logprobs is None) == (completion.cumulative_logprob is None) == (logprobs is None)
    if logprobs is not None:
        assert output.outputs[0].cumulative_logprob == pytest.approx(-1.4)


def test_sequences_of_a_beam_search_come_at_the_end_in_order() -> None:
    script = by_index(["best", "good"])
    for kind in MODES:
        params = {"use_beam_search": True, "temperature": 0, "n": 2, "beam_width": 4, "max_tokens": 9}
        outputs = run(engine_for(script), kind, **params)
        assert [(c.index, c.text, c.finish_reason) for c in outputs[0].outputs] == [
            (0, "best", "stop"),
            (1, "good", "stop"),
        ]
        assert len(outputs) == 1


def test_stop_strings_cut_the_texts_of_a_beam_search() -> None:
    """It has gone on behind them."""
    params = {"use_beam_search": True, "temperature": 0, "n": 2, "beam_width": 4, "max_tokens": 9, "stop": "o"}
    (output,) = run(engine_for(by_index(["best", "good"])), "final", **params)
    assert [(c.text, c.finish_reason, c.stop_reason) for c in output.outputs] == [
        ("best", "stop", None),
        ("g", "stop", "o"),
    ]
    assert [len(c.token_ids) for c in output.outputs] == [5, 2]


def test_an_abort_ends_all_samples_that_still_run() -> None:
    engine, processor = engine_for(by_index(["abc", "", "abc"])), OutputProcessor(TOKENIZER)
    request = engine.make_request("r", [5, 6, 7], SamplingParams(n=3))
    engine.add_request(request)
    processor.add(request)
    processor.process(engine.step())
    output = processor.abort("r")
    assert [c.finish_reason for c in output.outputs] == ["abort", "stop", "abort"]
    assert [c.text for c in output.outputs] == ["a", "", "a"]
    assert output.finished and len(processor) == 0
    assert processor.process(engine.step())[:2] == ([], [])


def test_a_timeout_is_told() -> None:
    engine, begin = engine_for([5]), time.monotonic()
    engine.clock = lambda: begin + 10 * engine.counts["num_steps"]
    (output,) = run(engine, "final", timeout=35, max_tokens=None)
    assert (output.finish_reason, output.stop_reason) == ("abort", "timeout")
    assert len(output.token_ids) == 4


class Broken(tiny_tokenizers.TinyTokenizer):
    """Token 7 has no bytes."""

    def __init__(self):
        super().__init__(TOKENIZER.hf, byte_level=True)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == 7:
            raise KeyError("no such token")
        return super().token_bytes(token_id)


@pytest.mark.parametrize(
    ("script", "params"),
    [
        ([5, 6, 7], {}),
        ([5, 6], {"logprobs": 1}),
        ([5, 6, 7], {"detokenize": False, "logprobs": 0, "n": 2}),
        ([5, 6], {"prompt_logprobs": 0}),
    ],
)
def test_a_fault_in_one_requests_output_ends_that_request_alone(script, params) -> None:
    """S21: in its text, in what its logprobs are called, or in its prompt."""
    engine, processor = engine_for(lambda r: script if r.request_id == "bad" else [5, EOS]), OutputProcessor(Broken())
    engine.tops = [6, 7] if "n" not in params else []
    if params.get("logprobs") == 1:
        engine.tops = [7]
    for name, options in (("bad", params), ("good", {})):
        request = engine.make_request(name, [5, 7, 5], SamplingParams(**options, output_kind="final"))
        engine.add_request(request)
        processor.add(request)
    ends = {}
    while engine.has_work:
        outputs, to_abort, _ = processor.process(engine.step())
        ends |= {o.request_id: o for o in outputs}
        for request_id, index in to_abort:
            engine.abort(request_id, index)
    assert ends["good"].finish_reason == "stop" and len(processor) == 0
    assert {c.finish_reason for c in ends["bad"].outputs} == {"error"}
    assert "no such token" in str(ends["bad"].stop_reason)
    assert engine.num_free == engine.num_blocks


def test_the_last_token_of_a_grammar_is_text() -> None:
    """It ends with "stop", but by no EOS or stop id."""
    processor, engine = OutputProcessor(TOKENIZER), engine_for([5])
    letter = TOKENIZER.byte_ids("a")[0]
    for last, text in ((letter, "aa"), (EOS, "a")):
        request = engine.make_request("r", [5], SamplingParams())
        processor.add(request)
        (output,), *_ = processor.process([RequestUpdate("r", [letter, last], finish_reason="stop")])
        assert (output.text, output.outputs[0].last_token_hidden) == (text, last == EOS)
