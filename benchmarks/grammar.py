"""What grammars cost on the host: compiling one, and a row of masks and a token a step.

    python -m benchmarks.grammar --vocab 49152 128256

The vocabulary is the demo model's; larger ones are filled up with joined pairs of its tokens. Texts are random walks
through the masks. A step's time is that of one row; the device computes meanwhile.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks import record
from jaxpaged.core.sampling_params import StructuredOutputs
from jaxpaged.text.grammar import GrammarCompiler, LLGuidanceGrammar
from jaxpaged.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["alpha", "beta", "gamma"]}},
        "about": {"type": "string", "maxLength": 400},
    },
    "required": ["name", "age", "email", "tags", "about"],
}
WANTED = {
    "JSON schema": StructuredOutputs(json=PERSON),
    "JSON object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex=r"[a-z]{3,200}@[a-z]{2,10}\.com"),
    "choice": StructuredOutputs(choice=[f"the {i}th of the choices" for i in range(100)]),
    "Lark": StructuredOutputs(grammar='start: sum\nsum: sum "+" part | part\npart: /[0-9]+/ | "(" sum ")"'),
}
TEXTS, TOKENS = 6, 100  # walks a grammar, tokens at most
COLUMNS = {
    "vocab_size": "vocabulary",
    "grammar": "grammar",
    "compile_ms": "compile",
    "copy_us": "copy",
    "fill_us": "fill",
    "fill_p99_us": "fill p99",
    "accept_us": "accept",
}


class Vocabulary:
    """As much of a tokenizer as grammars read, with more tokens than it has."""

    def __init__(self, tokenizer: Tokenizer, size: int):
        draw = random.Random(0)
        tokens = [tokenizer.token_bytes(i) for i in range(min(size, tokenizer.vocab_size))]
        base, known = tokens[300:], set(tokens)
        while len(tokens) < size:
            token = draw.choice(base) + draw.choice(base)
            if token not in known and len(token) < 24:
                known.add(token)
                tokens.append(token)
        self._tokens, self.vocab_size, self.special_ids = tokens, size, tokenizer.special_ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]


class Heart:
    """The longest time that a thread beside the work was kept from running, in ms."""

    def __enter__(self) -> Heart:
        self.gap_ms, self._stop = 0.0, False
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()
        return self

    def _beat(self) -> None:
        last = time.perf_counter()
        while not self._stop:
            time.sleep(0.001)
            now = time.perf_counter()
            self.gap_ms, last = max(self.gap_ms, 1e3 * (now - last)), now

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()


def walk(grammar: LLGuidanceGrammar, draw: random.Random, vocab_size: int) -> list[tuple[float, float]]:
    """Seconds of `fill` and of `accept`, a token."""
    mask, times, clock = np.zeros(-(-vocab_size // 32), np.int32), [], time.perf_counter
    while not grammar.finished and not grammar.error and len(times) < TOKENS:
        start = clock()
        grammar.fill(mask)
        filled = clock()
        token = draw.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
        chosen = clock()
        grammar.accept(token)
        times.append((filled - start, clock() - chosen))
    return times


def measure(compiler: GrammarCompiler, name: str, vocab_size: int) -> dict[str, Any]:
    """One row of the table: medians."""
    start = time.perf_counter()
    grammar = compiler.compile(WANTED[name])
    compiled = time.perf_counter()
    copies = [grammar.copy() for _ in range(TEXTS)]
    copied = time.perf_counter()
    draw = random.Random(0)
    fills, accepts = zip(*(times for copy in copies for times in walk(copy, draw, vocab_size)), strict=True)
    return {
        "vocab_size": vocab_size,
        "grammar": name,
        "compile_ms": 1e3 * (compiled - start),
        "copy_us": 1e6 * (copied - compiled) / TEXTS,
        "fill_us": 1e6 * statistics.median(fills),
        "fill_p99_us": 1e6 * sorted(fills)[int(0.99 * len(fills))],
        "accept_us": 1e6 * statistics.median(accepts),
    }


def main() -> None:
    """Measures, prints a table, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 128256], help="sizes of vocabularies")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_name("demo")
    rows = []
    for size in args.vocab:
        vocabulary = cast(Tokenizer, Vocabulary(tokenizer, size))
        compiler = GrammarCompiler(vocabulary, size, [tokenizer.eos_token_id or 0])
        start = time.perf_counter()
        with Heart() as heart:
            compiler.prepare()
        print(
            f"{size} tokens: ready in {time.perf_counter() - start:.2f} s, other threads waited {heart.gap_ms:.0f} ms"
        )
        rows += [measure(compiler, name, size) for name in WANTED]
        compiler.close()
    print(record.table(rows, COLUMNS))
    print("compile in ms, the rest in microseconds")
    if args.json:
        record.save(record.record("grammar", rows), args.json)


if __name__ == "__main__":
    main()
