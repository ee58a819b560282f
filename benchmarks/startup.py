"""How long starts take, with nothing compiled yet (cold) and with the cache of programs filled (warm).

    python -m benchmarks.startup

Every start is a process of its own, timed from its very beginning to the first generated token: of `jaxpaged chat`,
which runs one request at a time, in this package's own process; and of `jaxpaged serve` with default settings, over
HTTP. The server answers before its last program is compiled; `all_programs_s` is when it was.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.server_process import ServerProcess, free_port

BEGIN = time.perf_counter()

COLUMNS = {
    "what": "what",
    "start": "start",
    "import_s": "import s",
    "ready_s": "ready s",
    "first_token_s": "first token s",
    "programs": "programs",
    "all_programs_s": "all programs s",
}
PROMPT = "The capital of France is"
_SECONDS_WITHOUT_A_NEW_ONE = 20.0  # then all programs are taken to be there


def start_chat(model: str, cache: str) -> dict[str, Any]:
    """A start in this process: seconds to each stage. The weights are read while programs are compiled."""
    from jaxpaged import LLM, SamplingParams

    imported = time.perf_counter()
    llm = LLM(model, max_model_len=2048, max_num_seqs=1, compilation_cache_dir=cache, use_tqdm=False)
    ready = time.perf_counter()
    llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    first = time.perf_counter()
    return {
        "import_s": imported - BEGIN,
        "ready_s": ready - BEGIN,
        "first_token_s": first - BEGIN,
        "programs": llm.engine.num_programs,
        "late_compilations": llm.engine.num_compilations,
    }


def chat_in_subprocess(model: str, cache: str) -> dict[str, Any]:
    """`start_chat` in a new process, whose last line of output is its result."""
    command = [sys.executable, "-m", "benchmarks.startup", "--once", "--cache", cache, "--model", model]
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=record.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]) | {"process_s": time.perf_counter() - begin}


def start_server(model: str, cache: str) -> dict[str, Any]:
    """A server's start: to its first healthy answer, to the first streamed token, and to the last program."""
    port = free_port()
    command = [sys.executable, "-m", "server.cli", "serve", model, "--port", str(port)]
    begin = time.perf_counter()
    server = ServerProcess("jaxpaged", [*command, "--compilation-cache-dir", cache], port, log=Path(cache) / "log.txt")
    try:
        ready = time.perf_counter()
        _first_chunk(server.url, model)
        first = time.perf_counter()
        at_first = _programs(server.url)
        programs, last = at_first, ready
        while (now := time.perf_counter()) < max(first, last) + _SECONDS_WITHOUT_A_NEW_ONE:
            _first_chunk(server.url, model)  # a step, which tells
            if (count := _programs(server.url)) != programs:
                programs, last = count, now
            time.sleep(0.5)
        return {
            "ready_s": ready - begin,
            "first_token_s": first - begin,
            "programs_at_first": at_first,
            "programs": programs,
            "all_programs_s": last - begin,
        }
    finally:
        server.close()


def _first_chunk(url: str, model: str) -> None:
    """Asks for one token, streamed."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        assert answer.readline().startswith(b"data: {"), "no token came"
        answer.read()


def _programs(url: str) -> int:
    """Compiled programs, as of the last step."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        found = re.search(r"^jaxpaged:num_programs(?:\{.*\})? (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found, "the server does not tell its programs"
    return int(float(found[1]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", choices=["chat", "server"], help="one of the two")
    parser.add_argument("--repeat", type=int, default=1, help="warm starts after the cold one")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.once:
        print(json.dumps(start_chat(args.model, args.cache)))
        return
    rows = []
    for what, start in (("chat", chat_in_subprocess), ("server", start_server)):
        if args.only in (None, what):
            with tempfile.TemporaryDirectory() as cache:
                rows += [
                    {"what": what, "start": "warm" if run else "cold"} | start(args.model, cache)
                    for run in range(1 + args.repeat)
                ]
    print(record.table(rows, COLUMNS))
    if args.json:
        record.save(record.record("startup", rows, model=args.model, repeat=args.repeat), args.json)


if __name__ == "__main__":
    main()
