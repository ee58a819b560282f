"""How long a start takes, with nothing compiled yet (cold) and with the compilation cache filled (warm).

    python -m benchmarks.startup --model demo

Every start is a process of its own. "First token" runs from the process's first line to the first generated token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import record

BEGIN = time.perf_counter()

COLUMNS = {
    "start": "start",
    "import_s": "import s",
    "load_s": "load s",
    "warm_up_s": "warm-up s",
    "first_request_s": "first request s",
    "first_token_s": "first token s",
    "programs": "programs",
}


def start_once(args: argparse.Namespace) -> dict[str, Any]:
    """One start in this process: seconds of each stage."""
    from jaxpaged import LLM, SamplingParams

    imported = time.perf_counter()
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        compilation_cache_dir=args.cache,
        use_tqdm=False,
        warmup=False,
    )
    loaded = time.perf_counter()
    llm.engine.runner.warm_up()
    warm = time.perf_counter()
    llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    first = time.perf_counter()
    return {
        "import_s": imported - BEGIN,
        "load_s": loaded - imported,
        "warm_up_s": warm - loaded,
        "first_request_s": first - warm,
        "first_token_s": first - BEGIN,
        "programs": llm.engine.num_programs,
        "late_compilations": llm.engine.num_compilations,
    }


def start_in_subprocess(args: argparse.Namespace, cache: str) -> dict[str, Any]:
    """One start in a new process, whose last line of output is its result."""
    command = [sys.executable, "-m", "benchmarks.startup", "--once", "--cache", cache, "--model", args.model]
    command += ["--dtype", args.dtype, "--max-model-len", str(args.max_model_len)]
    command += ["--max-num-seqs", str(args.max_num_seqs)]
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=record.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]) | {"process_s": time.perf_counter() - begin}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=1, help="1 is what `jaxpaged chat` runs with")
    parser.add_argument("--repeat", type=int, default=1, help="warm starts after the cold one")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.once:
        print(json.dumps(start_once(args)))
        return
    with tempfile.TemporaryDirectory() as cache:
        rows = [
            {"start": "warm" if run else "cold"} | start_in_subprocess(args, cache) for run in range(1 + args.repeat)
        ]
    print(record.table(rows, COLUMNS))
    if args.json:
        settings = {key: str(value) for key, value in vars(args).items() if key not in ("once", "cache")}
        record.save(record.record("startup", rows, **settings), args.json)


if __name__ == "__main__":
    main()
