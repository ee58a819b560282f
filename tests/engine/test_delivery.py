"""What readers and observers get of a core's messages, whatever their event loops do."""

from __future__ import annotations

from collections.abc import Callable
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


class Loop:
    """An event loop that runs what it is given when it is told to."""

    def __init__(self) -> None:
        self.todo: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, function: Callable[..., None], *arguments: Any) -> None:
        self.todo.append(lambda: function(*arguments))

    def run(self) -> None:
        while self.todo:
            self.todo.pop(0)()


class Steps:
    """Notes what it is told of steps."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def on_added(self, request: Any) -> None: ...
    def on_finished(self, request: Any, end: Any) -> None: ...
    def on_step(self, core_index: int, stats: EngineStats, tokens: StepTokens) -> None:
        self.told.append((stats.num_preemptions, tokens.num_generated_tokens))


def test_a_loop_that_is_late_takes_no_counter_back() -> None:
    """Each loop brings its own tokens; of the core's counters the latest are told."""
    steps, loops = Steps(), (Loop(), Loop())
    client: Any = SimpleNamespace(num_cores=1)
    delivery = Delivery(client, TOKENIZER, Observers(steps))
    for name, loop in zip("ab", loops, strict=True):
        request = Request(name, [5], SamplingParams(max_tokens=9), max_model_len=50)
        delivery._processor.add(request)
        stream_loop: Any = loop
        delivery.streams[name] = OutputStream(name, stream_loop, 0.0, merge=True)
    for step in (1, 2):
        updates = [RequestUpdate("a", [5] * step), RequestUpdate("b", [5])]
        delivery.receive_updates(0, Updates(updates, EngineStats(num_preemptions=step), 0.0))
    late, early = loops
    early.run()
    late.run()
    assert steps.told == [(1, 1), (2, 1), (2, 1), (2, 2)]


def test_a_prompt_of_several_samples_without_tokens_counts_once() -> None:
    processor = OutputProcessor(None)
    processor.add(Request("r", [5, 6, 7], SamplingParams(n=2, max_tokens=0, prompt_logprobs=0), max_model_len=50))
    processor.process([RequestUpdate("r", [], None, "length", index=index) for index in range(2)])
    assert processor.tokens.num_prompt_tokens == 3
