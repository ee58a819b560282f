"""The parts of the way from the engine to an HTTP client, each timed alone in a loop."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import http_front
from benchmarks.scripted_engine import VOCAB_SIZE, write_tokenizer
from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import RequestUpdate
from jaxpaged.engine import messages
from jaxpaged.engine.garbage import collect_seldom
from jaxpaged.engine.output import RequestOutput
from jaxpaged.engine.output_processor import OutputProcessor
from jaxpaged.engine.stats import EngineStats
from jaxpaged.text.detokenizer import Detokenizer
from jaxpaged.text.tokenizer import Tokenizer
from server.answers import length
from server.chunks import Chunks
from server.failures import Failures

COLUMNS = {"part": "part", "where": "process", "us": "us/token"}
STREAMS = 200
STEPS = 100
REPEAT = 5


def measure() -> list[dict[str, Any]]:
    """Microseconds a token of each part, with 200 streams a step."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = Tokenizer.from_folder(Path(folder))
    tokens = [_tokens(step) for step in range(STEPS)]
    steps = [_updates(step) for step in range(STEPS)]
    frames = [messages.encode(messages.Updates(updates, EngineStats(), 0.0)) for updates in steps]
    outputs = _process(tokenizer, steps)
    collect_seldom()  # as the API process does
    parts: dict[tuple[str, str], Callable[[], Any]] = {
        ("encoding messages", "core"): lambda: [
            messages.encode(messages.Updates(updates, EngineStats(), 0.0)) for updates in steps
        ],
        ("decoding messages", "front"): lambda: [messages.decode_from_core(frame) for frame in frames],
        ("detokenizing", "front"): lambda: _detokenize(tokenizer, tokens),
        ("outputs, with detokenizing", "front"): lambda: _process(tokenizer, steps),
        ("JSON", "front"): lambda: _write(outputs),
    }
    rows = [{"part": part, "where": where, "us": _best(run)} for (part, where), run in parts.items()]
    for endpoint in http_front.BODIES:
        us = min(1e6 * http_front.seconds_a_token(tokenizer, tokens, endpoint) for _ in range(REPEAT))
        rows.append({"part": f"all but the socket, {endpoint}", "where": "front", "us": us})
    return rows


def _best(run: Callable[[], Any]) -> float:
    """CPU microseconds a token, of the quickest of some runs: what others do on the machine only adds."""
    seconds = []
    for _ in range(REPEAT):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return 1e6 * min(seconds) / (STEPS * STREAMS)


def _tokens(step: int) -> list[int]:
    return [(step * 7919 + stream * 31) % (VOCAB_SIZE - 1) for stream in range(STREAMS)]


def _updates(step: int) -> list[RequestUpdate]:
    return [RequestUpdate(_name(i), [token]) for i, token in enumerate(_tokens(step))]


def _name(stream: int) -> str:
    return f"cmpl-{stream:032x}#{stream}"


def _detokenize(tokenizer: Tokenizer, steps: list[list[int]]) -> None:
    detokenizers = [Detokenizer(tokenizer, [5], SamplingParams(max_tokens=STEPS)) for _ in range(STREAMS)]
    for tokens in steps:
        for detokenizer, token in zip(detokenizers, tokens, strict=True):
            detokenizer.update([token])


def _process(tokenizer: Tokenizer, steps: list[list[RequestUpdate]]) -> list[list[RequestOutput]]:
    processor = OutputProcessor(tokenizer, in_slices=True)
    params = SamplingParams(max_tokens=STEPS + 1, output_kind="delta")
    for i in range(STREAMS):
        processor.add(Request(_name(i), [5], params, max_model_len=4096))
    return [processor.process(updates).outputs for updates in steps]


def _write(outputs: list[list[RequestOutput]]) -> None:
    head = {"id": _name(0), "object": "text_completion", "created": 1_700_000_000, "model": "m"}
    chunks = Chunks({**head, "system_fingerprint": "jaxpaged-0"}, None, [_Choices()], Failures(1, _name(0)))
    for step in outputs:
        for output in step:
            chunks.count(0, output)
            length(output)
            chunks.write(0, output)


class _Choices:
    """Those of a completion of which nothing but text is wanted."""

    reasoning_tokens = None

    def pieces(self, output: RequestOutput) -> list[dict[str, Any]]:
        return [{"index": 0, "text": output.text, "logprobs": None, "finish_reason": None, "stop_reason": None}]

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        return {}
