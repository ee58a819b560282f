"""Log-probabilities of given tokens, and of the prompt."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import RequestUpdate, TokenLogprobs
from jaxpaged.engine.describer import SLICE_TOKENS
from jaxpaged.engine.output import logprob_arrays
from jaxpaged.engine.output_processor import OutputProcessor
from tests.engine.outputs import MODES, TOKENIZER, engine_for, joined, run

pytestmark = pytest.mark.usefixtures("frozen_heap")  # times are taken


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
