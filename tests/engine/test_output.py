"""Updates to outputs: kinds, samples, cuts at stop strings, logprobs. Cases B02, B04, B10, B11, B18, B35, B43."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import RequestUpdate, TokenLogprobs
from jaxpaged.engine.describer import SLICE_TOKENS
from jaxpaged.engine.output import RequestOutput, logprob_arrays
from jaxpaged.engine.output_processor import OutputProcessor
from tests import tiny_tokenizers
from tests.fake_engine import FakeEngine

TOKENIZER = tiny_tokenizers.byte_level()
EOS = 2
MODES = ["cumulative", "delta", "final"]


def engine_for(script, **options) -> FakeEngine:
    return FakeEngine(script, vocab_size=TOKENIZER.vocab_size, eos_token_ids=[EOS], **options)


def run(engine: FakeEngine, mode: str, *, tokenizer=TOKENIZER, **params) -> list[RequestOutput]:
    """All outputs of one request."""
    processor = OutputProcessor(tokenizer)
    request = engine.make_request("r", [5, 6, 7], SamplingParams(**params, output_kind=mode))
    engine.add_request(request)
    processor.add(request, "prompt")
    outputs: list[RequestOutput] = []
    while engine.has_work:
        new, to_abort, _ = processor.process(engine.step())
        outputs += new
        for request_id, index in to_abort:
            assert engine.abort(request_id, index)
    assert len(processor) == 0
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs


def joined(outputs: list[RequestOutput]) -> RequestOutput:
    whole, *rest = outputs
    for output in rest:
        whole.extend(output)
    return whole


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


# --- several samples -------------------------------------------------------------------------------------------


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


# --- log-probabilities of given tokens, and of the prompt ------------------------------------------------------


def test_given_tokens_keep_their_order_and_ranks() -> None:
    (output,) = run(engine_for([5]), "final", max_tokens=1, logprobs=0, logprob_token_ids=[9, 8])
    assert [(t.token_id, t.rank) for t in output.logprobs[0].top] == [(9, 7), (8, 7)]
    np.testing.assert_array_equal(logprob_arrays(output.logprobs).top_ranks, [[7, 7]])


def test_all_of_the_vocabulary() -> None:
    (output,) = run(engine_for([5], max_logprobs=-1), "final", max_tokens=1, logprobs=-1)
    assert [t.token_id for t in output.logprobs[0].top] == list(range(TOKENIZER.vocab_size))


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs_are_those_of_the_prompts_tokens(kind, n) -> None:
    """B43: first is None; offsets point into the prompt's text; of the deltas one has them."""
    engine, processor = engine_for([5, 6, 8], tokens_per_step=1), OutputProcessor(TOKENIZER)
    engine.tops = [9]
    ids = [1, *TOKENIZER.ids("The", "Ġfox")]
    request = engine.make_request("r", ids, SamplingParams(prompt_logprobs=1, max_tokens=3, n=n, output_kind=kind))
    engine.add_request(request)
    processor.add(request, "The fox")
    outputs = []
    while engine.has_work:
        outputs += processor.process(engine.step()).outputs
    carriers = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    assert len(carriers) == (1 if kind != "cumulative" else len(outputs))
    for positions in [*carriers, joined(outputs).prompt_logprobs]:
        assert positions[0] is None
        assert [(p.token_id, p.token, p.text_offset) for p in positions[1:]] == [
            (ids[1], "The", 0),
            (ids[2], " fox", 3),
        ]
        assert all([t.token_id for t in p.top] == [9] for p in positions[1:])


def test_prompt_logprobs_that_come_in_pieces_are_one_list_and_end_nothing() -> None:
    """B39, at this level."""
    processor, engine = OutputProcessor(TOKENIZER), engine_for([5])
    processor.add(engine.make_request("r", [5, 6, 7, 8], SamplingParams(prompt_logprobs=0)))
    entries = [TokenLogprobs(token, -1.0, 1, [], []) for token in (6, 7, 8)]
    assert processor.process([RequestUpdate("r", [], prompt_logprobs=entries[:2])])[:2] == ([], [])
    (output,), *_ = processor.process([RequestUpdate("r", [9], prompt_logprobs=entries[2:])])
    assert [p and p.token_id for p in output.prompt_logprobs] == [None, 6, 7, 8] and not output.finished


@pytest.mark.parametrize("kind", MODES)
def test_scoring_a_prompt_generates_nothing(kind) -> None:
    """B18."""
    (output,) = run(engine_for([5]), kind, max_tokens=0, prompt_logprobs=0)
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")
    assert [p and p.token_id for p in output.prompt_logprobs] == [None, 6, 7]
    assert output.metrics.num_output_tokens == 0


def unscored(kind: str = "final", *, length: int = 3000, k: int = 20, **params):
    """A request for prompt logprobs, its records, and what follows it in slices."""
    request = engine_for([5], max_model_len=10**5, max_logprobs=k).make_request(
        "r", [5] * length, SamplingParams(prompt_logprobs=k, output_kind=kind, **params)
    )
    processor = OutputProcessor(TOKENIZER, in_slices=True)
    processor.add(request)
    records = [TokenLogprobs(5, -1.0, 1, list(range(5, 5 + k)), [-1.0] * k) for _ in range(length - 1)]
    return processor, records


@pytest.mark.parametrize("kind", MODES)
def test_a_long_prompt_is_described_in_short_slices(kind) -> None:
    """Nothing is sent before all of it is, and then everything that came meanwhile."""
    processor, records = unscored(kind)
    pieces = [records[:1000], records[1000:]]
    updates = [RequestUpdate("r", [], prompt_logprobs=piece) for piece in pieces]
    assert processor.process(updates)[:2] == ([], [])
    assert processor.process([RequestUpdate("r", [6])])[:2] == ([], [])
    assert processor.process([RequestUpdate("r", [7], finish_reason="length")])[:2] == ([], [])
    outputs, slices = [], []
    while processor.is_behind("r"):
        start = time.thread_time()
        outputs += processor.describe("r")[0]
        slices.append(time.thread_time() - start)
    assert len(slices) == math.ceil(3000 * 21 / SLICE_TOKENS)
    assert sorted(slices)[len(slices) // 2] < 0.05  # not the longest: a collection of garbage may fall into one
    assert [(o.token_ids, o.finished, len(o.prompt_logprobs)) for o in outputs] == [([6, 7], True, 3000)]
    assert len(processor) == 0 and processor.describe("r") == ([], [])


def test_an_abort_waits_for_no_description() -> None:
    for ended in (None, "length"):
        processor, records = unscored()
        processor.process([RequestUpdate("r", [], prompt_logprobs=records), RequestUpdate("r", [6], None, ended)])
        processor.describe("r")
        output = processor.abort("r")
        assert output.finish_reason == (ended or "abort") and output.prompt_logprobs is None
        assert len(processor) == 0


def test_prompt_logprobs_are_whole_or_none() -> None:
    """A request that ends before its prompt is computed has none; the end of sample 0 takes none away."""
    for kind in MODES:
        processor, records = unscored(kind, length=9, k=0)
        processor.process([RequestUpdate("r", [], prompt_logprobs=records[:4])])
        assert processor.describe("r") == ([], [])
        (end,), *_ = processor.process([RequestUpdate("r", [], finish_reason="abort", stop_reason="timeout")])
        assert (end.finish_reason, end.prompt_logprobs, len(processor)) == ("abort", None, 0)
    processor, records = OutputProcessor(TOKENIZER), records
    params = SamplingParams(prompt_logprobs=0, n=2, output_kind="final")
    processor.add(engine_for([5]).make_request("r", [5] * 9, params))
    processor.process([RequestUpdate("r", [6], finish_reason="stop", prompt_logprobs=records)])
    (output,), *_ = processor.process([RequestUpdate("r", [6], finish_reason="stop", index=1)])
    assert len(output.prompt_logprobs) == 9
