"""`jaxpaged chat MODEL [PROMPT]`: talk to a model in the terminal. The answer goes to stdout, all else to stderr."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Generator, Iterator
from typing import Any

import msgspec

from jaxpaged.config import EngineConfig
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.load import load_engine
from jaxpaged.engine.output import RequestMetrics, RequestOutput
from jaxpaged.engine.output_processor import OutputProcessor
from jaxpaged.errors import InvalidRequestError
from jaxpaged.progress import ProgressBars
from jaxpaged.text.chat import render_chat
from jaxpaged.text.tokenizer import Tokenizer
from server.options import add_flags, engine_config_of, flags

# What matters to one conversation: nothing of queues, neighbours and log-probabilities.
_ENGINE_FLAGS = (
    "tokenizer", "dtype", "load_format", "max_model_len", "seed", "kv_cache_dtype", "block_size", "num_kv_blocks",
    "kv_cache_bytes", "gpu_memory_utilization", "enable_prefix_caching", "attention_implementation", "overlap",
    "warmup", "compilation_cache_dir", "strict", "debug_kernels",
)  # fmt: skip


def add_chat_command(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        usage="jaxpaged chat MODEL [PROMPT] [options]",
        description="Talks to a model in the terminal. The answer goes to stdout, all else to stderr.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help='"demo", a local folder, a .gguf file, or a Hugging Face name')
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="what to ask; without it: a conversation, or what stdin holds"
    )
    group = parser.add_argument_group("chat")
    group.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    group.add_argument("--max-tokens", type=int, default=512, metavar="N",
                       help="most tokens of an answer (default: 512)")  # fmt: skip
    group.add_argument(
        "--temperature", type=float, default=0.0, help="0 is greedy (the default); higher is more varied"
    )
    group.add_argument(
        "--top-p", type=float, default=1.0, help="keep the likeliest tokens of this mass (default: 1, all)"
    )
    add_flags(parser, [flag for flag in flags([EngineConfig]) if flag.field in _ENGINE_FLAGS])
    parser.set_defaults(run=chat, parser=parser)


def chat(arguments: argparse.Namespace) -> int:
    """Answers one prompt or holds a conversation; the exit status."""
    params = SamplingParams(temperature=arguments.temperature, top_p=arguments.top_p, max_tokens=arguments.max_tokens)
    prompts = _prompts(arguments.prompt)
    started = time.monotonic()
    with ProgressBars() as bars:  # one request at a time needs few programs
        engine, tokenizer = load_engine(engine_config_of(arguments, max_num_seqs=1), bars.update)
    print(f"ready after {time.monotonic() - started:.1f} s", file=sys.stderr)
    conversation = Conversation(engine, tokenizer, params, arguments.system)
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


def _prompts(prompt: str | None) -> Iterator[str]:
    """The prompt given, or all of stdin, or what is typed until it ends. Read before the model is loaded."""
    if prompt is None and sys.stdin.isatty():
        return _typed()
    prompt = sys.stdin.read().strip() if prompt is None else prompt
    if not prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    return iter([prompt])


def _typed() -> Iterator[str]:
    print("Ctrl-D ends the conversation.", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return
        if line:
            yield line


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
                outputs, _ = processor.process(engine.step())
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
