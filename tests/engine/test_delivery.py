"""What readers and observers get of a core's messages, whatever their event loops do."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import RequestUpdate
from jaxpaged.engine.delivery import Delivery
from jaxpaged.engine.messages import Updates
from jaxpaged.engine.observer import Observers, StepTokens
from jaxpaged.engine.output_processor import OutputProcessor
from jaxpaged.engine.output_stream import OutputStream
from jaxpaged.engine.stats import EngineStats
from tests import tiny_tokenizers

TOKENIZER = tiny_tokenizers.byte_level()


def test_a_prompt_of_several_samples_without_tokens_counts_once() -> None:
    processor = OutputProcessor(None)
    processor.add(Request("r", [5, 6, 7], SamplingParams(n=2, max_tokens=0, prompt_logprobs=0), max_model_len=50))
    tokens = processor.process([RequestUpdate("r", [], None, "length", index=index) for index in range(2)]).tokens
    assert tokens.num_prompt_tokens == 3


def test_an_abort_takes_no_tokens_of_a_step_away() -> None:
    """A stop string that ends a sample, as a reader leaves another request while its step is told."""
    told: list[int] = []

    class Leaves:
        def on_added(self, request: Any) -> None: ...
        def on_finished(self, request: Any, end: Any) -> None: ...
        def on_step(self, core_index: int, stats: EngineStats, tokens: StepTokens) -> None:
            delivery.forget("b")
            told.append(tokens.num_generated_tokens)

    async def test() -> None:
        delivery._loop = loop = asyncio.get_running_loop()
        for name in "ab":
            delivery._processor.add(Request(name, [5], SamplingParams(max_tokens=9), max_model_len=50))
            delivery.streams[name] = OutputStream(name, loop, 0.0, merge=True)
        delivery._deliver(0, Updates([RequestUpdate(name, [5, 6]) for name in "ab"], EngineStats(), 0.0))

    client: Any = SimpleNamespace(num_cores=1)
    delivery = Delivery(client, TOKENIZER, Observers(Leaves()))
    asyncio.run(test())
    assert told == [4]
