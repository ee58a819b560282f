"""`jaxpaged chat MODEL [PROMPT]`: talk to a model in the terminal. The answer goes to stdout, all else to stderr."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Generator, Iterable

import msgspec

from jaxpaged.config import EngineConfig
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.load import load_engine
from jaxpaged.engine.output import RequestMetrics, RequestOutput
from jaxpaged.engine.output_processor import OutputProcessor
from jaxpaged.progress import ProgressBars
from jaxpaged.text.chat import render_chat
from jaxpaged.text.tokenizer import Tokenizer


def chat(config: EngineConfig, params: SamplingParams, prompts: Iterable[str], system: str | None) -> int:
    """Answers the prompts, as one conversation; the exit status."""
    started = time.monotonic()
    with ProgressBars(config.compilation_cache_dir) as bars:
        engine, tokenizer = load_engine(config, bars.update)
    print(f"ready after {time.monotonic() - started:.1f} s", file=sys.stderr)
    conversation = Conversation(engine, tokenizer, params, system)
    try:
        for prompt in prompts:
            for text in conversation.ask(prompt):
                print(text, end="", flush=True)
            print(flush=True)
            if conversation.metrics is not None:
                print(_summary(engine, conversation.metrics), file=sys.stderr)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


class Conversation:
    """Turns with one model; each answer sees all turns before it.

    Attributes:
      metrics: times of the last answer.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, params: SamplingParams, system: str | None = None):
        self._engine, self._tokenizer = engine, tokenizer
        self._params = msgspec.structs.replace(params, output_kind="delta")
        self._messages = [{"role": "system", "content": system}] if system else []
        self._ids = itertools.count()
        self.metrics: RequestMetrics | None = None

    def ask(self, prompt: str) -> Generator[str, None, None]:
        """The answer in pieces. Leaving early keeps what was said so far."""
        self._messages.append({"role": "user", "content": prompt})
        answer = ""
        with contextlib.closing(self._outputs(render_chat(self._tokenizer, self._messages))) as outputs:
            try:
                for output in outputs:
                    answer += output.text
                    self.metrics = output.metrics
                    yield output.text
            finally:
                self._messages.append({"role": "assistant", "content": answer})

    def _outputs(self, prompt_ids: list[int]) -> Generator[RequestOutput, None, None]:
        engine, processor = self._engine, OutputProcessor(self._tokenizer)
        request = engine.make_request(f"chat-{next(self._ids)}", prompt_ids, self._params)
        engine.add_request(request)
        processor.add(request)
        try:
            while len(processor):
                outputs, _, _ = processor.process(engine.step())
                yield from outputs
        finally:
            engine.abort(request.request_id)
            while engine.has_work:  # collects what is still in flight
                engine.step()


def _summary(engine: Engine, metrics: RequestMetrics) -> str:
    rate, first = metrics.tokens_per_second, metrics.time_to_first_token
    parts = [
        f"{metrics.num_output_tokens} tokens",
        f"{rate:.1f} tokens/s" if rate else "",
        f"first token after {first:.2f} s" if first is not None else "",
        f"{engine.num_programs} programs compiled, {engine.num_compilations} of them after warm-up",
    ]
    return "[" + ", ".join(part for part in parts if part) + "]"
