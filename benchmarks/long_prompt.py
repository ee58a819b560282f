"""What the requests that run notice of a long prompt: the real engine on a device that takes no time.

    python -m benchmarks.long_prompt --json benchmarks/results/long_prompt.json

While requests generate, a prompt of 100,000 tokens comes; then another one that is the same, all of which is in the
prefix cache. A round is one of the core's loop: `Engine.step`, and the message with its updates. The longest one is
looked for from when the request is added until its blocks have been released; the longest without it, among as many
before. What comes first is not in that loop: checks and a copy of the tokens, in both processes, and the message
between them. Times in ms, of the CPU.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.fake_device import BLOCK_SIZE, VOCAB_SIZE, FakeDevice, WallClock, fake_engine
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.garbage import collect_seldom
from jaxpaged.engine.messages import AddRequest, Updates, decode_to_core, encode

NUM_RUNNING = 64
WARM_UP_ROUNDS = 200
MAX_MODEL_LEN = 131_072
COLUMNS = {
    "prompt": "prompt",
    "tokens": "tokens",
    "check_ms": "check ms",
    "encode_ms": "encode ms",
    "decode_ms": "decode ms",
    "add_ms": "add ms",
    "longest_round_ms": "longest round ms",
    "longest_round_without_ms": "without it ms",
    "rounds_to_first_token": "rounds to first token",
}


def measure(num_tokens: int) -> list[dict[str, Any]]:
    """A row for a new prompt, and one for the same again."""
    device = FakeDevice(0.0, WallClock())
    num_blocks = 2 * num_tokens // BLOCK_SIZE + NUM_RUNNING * 100
    engine = fake_engine(NUM_RUNNING + 1, device, max_model_len=MAX_MODEL_LEN, num_blocks=num_blocks)
    source = random.Random(0)
    for i in range(NUM_RUNNING):
        prompt = source.choices(range(VOCAB_SIZE - 1), k=128)
        engine.add_request(engine.make_request(f"running-{i}", prompt, SamplingParams(max_tokens=10_000)))
    prompt = source.choices(range(VOCAB_SIZE - 1), k=num_tokens)
    return [
        {"prompt": name, "tokens": num_tokens} | _one(engine, f"long-{name}", prompt) for name in ("new", "all cached")
    ]


def _one(engine: Engine, request_id: str, prompt: list[int]) -> dict[str, Any]:
    before = [_round(engine, request_id)[0] for _ in range(WARM_UP_ROUNDS)]
    params = SamplingParams(max_tokens=2)
    start = time.thread_time()
    request = engine.make_request(request_id, prompt, params)
    made = time.thread_time()
    engine.add_request(request)
    added = time.thread_time()
    frame = encode(AddRequest(request_id, prompt, params, 0.0))
    encoded = time.thread_time()
    decode_to_core(frame)
    decoded = time.thread_time()
    rounds, first = [], 0
    while not request.finish_reason:
        seconds, came = _round(engine, request_id)
        rounds.append(seconds)
        first = first or (came and len(rounds))
    return {
        "check_ms": 1e3 * (made - start),
        "encode_ms": 1e3 * (encoded - added),
        "decode_ms": 1e3 * (decoded - encoded),
        "add_ms": 1e3 * (added - made),
        "longest_round_ms": 1e3 * max(rounds),
        "longest_round_without_ms": 1e3 * max(before[-len(rounds) :]),
        "rounds_to_first_token": first,
    }


def _round(engine: Engine, request_id: str) -> tuple[float, bool]:
    """Seconds of a round, and whether it brought this request a token."""
    start = time.thread_time()
    updates = engine.step()
    encode(Updates(updates, engine.stats, start))
    seconds = time.thread_time() - start
    return seconds, any(update.request_id == request_id for update in updates)


def main() -> None:
    """Measures, prints a table, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000, 100_000], help="lengths of the prompt")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    collect_seldom()  # as serving processes do
    rows = [row for num_tokens in args.tokens for row in measure(num_tokens)]
    print(record.table(rows, COLUMNS))
    if args.json:
        record.save(record.record("long_prompt", rows, num_running=NUM_RUNNING, block_size=BLOCK_SIZE), args.json)


if __name__ == "__main__":
    main()
