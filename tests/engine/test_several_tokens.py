"""B10: a runner that yields several tokens a row and step, or does several steps as one. Requests end as with one."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.step import Step, StepResult, TokenLogprobs
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.output import RequestOutput
from jaxpaged.engine.output_processor import OutputProcessor
from tests import tiny_tokenizers

TOKENIZER = tiny_tokenizers.byte_level()
EOS = 2


@dataclasses.dataclass
class _Launched:
    step: Step
    num_padding_tokens: int = 0


class ScriptedRunner:
    """Continues every sequence by a script, a few tokens at a time."""

    module = SimpleNamespace(config=SimpleNamespace(hidden_size=0))
    num_programs = 0

    def __init__(self, script: list[int], tokens_per_step: int):
        self.script, self.tokens_per_step = script, tokens_per_step

    def pack_options(self, request):
        return None

    def launch(self, step: Step) -> _Launched:
        return _Launched(step)

    def collect(self, launched: _Launched) -> StepResult:
        step = launched.step
        count = step.num_steps if step.num_steps > 1 else self.tokens_per_step
        rows = [
            self._next(request, count) if samples else []
            for request, samples in zip(step.requests, step.samples, strict=True)
        ]
        records = [[TokenLogprobs(t, -t / 100, 1, [t, 5], [-t / 100, -9.0]) for t in row] for row in rows]
        return StepResult(rows, records if step.wants_logprobs else None, num_steps=step.num_steps)

    def _next(self, request, count: int) -> list[int]:
        done = request.num_output_tokens
        return [self.script[i % len(self.script)] for i in range(done, done + count)]


def generate(
    script, tokens_per_step, params, *, blocks=32, requests=1, max_steps=1, overlap=False
) -> list[RequestOutput]:
    """The last output of each of a few equal requests."""
    scheduler = Scheduler(BlockManager(blocks, 4), max_num_seqs=4, max_num_batched_tokens=32, max_model_len=100)
    config = EngineConfig(overlap=overlap, max_model_len=100, max_decode_steps=max_steps, max_decode_seconds=1e6)
    runner = ScriptedRunner(script, tokens_per_step)
    engine = Engine(scheduler, runner, config, vocab_size=TOKENIZER.vocab_size, eos_token_ids=[EOS])
    processor, last = OutputProcessor(TOKENIZER), {}
    for i in range(requests):
        request = engine.make_request(f"r{i}", [5, 6, 7 + i], params)
        engine.add_request(request)
        processor.add(request)
    while engine.has_work:
        outputs, to_abort, _ = processor.process(engine.step())
        last |= {output.request_id: output for output in outputs}
        for request_id, index in to_abort:
            assert engine.abort(request_id, index)
        scheduler.check_invariants()
    assert scheduler.block_manager.num_used_blocks == 0 and len(processor) == 0
    assert len(last) == requests and all(output.finished for output in last.values())
    return [last[f"r{i}"] for i in range(requests)]


WORDS = TOKENIZER.ids("The", "Ġquick", "Ġbr", "own", "Ġfox")
CASES = {
    "stop string": (TOKENIZER.ids("Ġha"), {"stop": [" ha ha ha"], "logprobs": 2, "max_tokens": 50}),
    "stop string in a token": (WORDS, {"stop": ["wn f"], "logprobs": 1, "include_stop_str_in_output": True}),
    "eos": ([*WORDS, EOS, *WORDS], {"logprobs": 0, "max_tokens": 50}),
    "eos ignored": ([*WORDS, EOS], {"ignore_eos": True, "max_tokens": 13}),
    "stop id": (WORDS, {"stop_token_ids": [WORDS[3]], "logprobs": 2}),
    "stop id too early": (WORDS, {"stop_token_ids": [WORDS[1]], "min_tokens": 5, "max_tokens": 50}),
    "length": (WORDS, {"max_tokens": 7, "logprobs": 1}),
    "context": (WORDS, {"max_tokens": None}),
    "half a character": (TOKENIZER.byte_ids("🔥"), {"max_tokens": 6}),
}


@pytest.mark.parametrize("tokens_per_step", [2, 3, 4, 7])
@pytest.mark.parametrize("case", CASES)
def test_it_ends_at_the_same_token(case, tokens_per_step):
    script, options = CASES[case]
    params = SamplingParams(temperature=0, **options)
    (expected,) = generate(script, 1, params)
    (output,) = generate(script, tokens_per_step, params)
    assert output.outputs == expected.outputs
    assert output.metrics.num_output_tokens == len(expected.token_ids)
    if params.logprobs is not None:
        assert len(output.logprobs) == len(output.token_ids)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_steps", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_so_it_does_where_several_steps_are_one(case, max_steps, overlap):
    """Though this device does not stop early."""
    script, options = CASES[case]
    params = SamplingParams(temperature=0, **{**options, "logprobs": None})
    expected = generate(script, 1, params, requests=3)
    outputs = generate(script, 1, params, requests=3, max_steps=max_steps, overlap=overlap)
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    assert [o.metrics.num_output_tokens for o in outputs] == [o.metrics.num_output_tokens for o in expected]


@pytest.mark.parametrize("tokens_per_step", [2, 5])
def test_so_it_does_when_preempted(tokens_per_step):
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[99])
    expected = generate(WORDS, 1, params, requests=4)
    outputs = generate(WORDS, tokens_per_step, params, requests=4, blocks=14)
    assert [o.outputs for o in outputs] == [o.outputs for o in expected]
