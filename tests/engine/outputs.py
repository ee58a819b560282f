"""What an OutputProcessor makes of a fake engine's updates."""

from __future__ import annotations

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.output import RequestOutput
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
