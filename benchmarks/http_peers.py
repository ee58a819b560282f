"""Streaming over HTTP: jaxpaged and vLLM for CPU with the same model, the same clients, in one run on one machine.

    python -m benchmarks.peers --make-env ~/peers                 # once: vLLM for CPU (several GB)
    python -m benchmarks.http_peers --peers-env ~/peers --json benchmarks/results/http_peers.json

The model is random and has one small layer, so that most of what is measured is the way to the client.
Both servers run with it loaded; they take turns, repetition by repetition, and whoever is not measured is stopped
(SIGSTOP). The load is closed: as many streams as the column says, each followed by the next. Clients: ours, `online`
("lean"), and `vllm bench serve` ("vllm"), which takes more of the cores that it shares with the server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import online, record
from benchmarks.peer_env import preloads
from benchmarks.server_process import ServerFailedError, ServerProcess, free_port

CONFIG = Path(__file__).parent / "configs" / "one-layer-llama.json"
SERVERS = ("jaxpaged", "vllm")
CLIENTS = ("lean", "vllm")
FIGURES = ("output_throughput", "median_ttft_ms", "median_itl_ms", "p99_itl_ms", "median_tpot_ms")


def write_model(folder: Path) -> None:
    """A folder with the config and a tokenizer, and no weights."""
    from jaxpaged.text.tokenizer import Tokenizer

    folder.mkdir(parents=True)
    Tokenizer.from_name("demo").hf.save_pretrained(folder)
    shutil.copyfile(CONFIG, folder / "config.json")


def serve_command(name: str, model: Path, port: int, args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """What starts a server, and the variables it is started with."""
    shared = ["--load-format", "dummy", "--dtype", args.dtype, "--host", "127.0.0.1", "--port", str(port)]
    shared += ["--max-model-len", str(max(256, 2 * (args.input_len + args.output_len)))]
    shared += ["--max-num-seqs", str(max(args.streams)), "--served-model-name", "model"]
    shared += ["--disable-uvicorn-access-log"]
    if name == "vllm":
        environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        program = [str(args.peers_env / "bin" / "python"), "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        return [*program, *shared, *args.vllm_flags.split()], environment | preloads(args.peers_env)
    program = [sys.executable, "-m", "server.cli", "serve", str(model), "--strict"]  # when all programs are there
    return [*program, *shared, *args.jaxpaged_flags.split()], {"PYTHONPATH": str(record.ROOT)}


@contextlib.contextmanager
def started(args: argparse.Namespace, model: Path, logs: Path) -> Iterator[list[ServerProcess]]:
    """The servers, paused; ended at exit. One that fails is named and left out."""
    servers: list[ServerProcess] = []
    try:
        for name in args.servers:
            port = free_port()
            command, environment = serve_command(name, model, port, args)
            print(f"  starting {name}", flush=True)
            try:
                server = ServerProcess(name, command, port, log=logs / f"{name}.log", environment=environment)
            except ServerFailedError as error:
                print(f"{name}: left out: {error}")
                continue
            servers.append(server)
            server.pause()
        yield servers
    finally:
        for server in servers:
            server.close()


def lean_client(server: ServerProcess, streams: int, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Figures of one run of our client."""
    figures, outcomes = uvloop.run(
        online.run(
            online.arguments(
                f"--base-url {server.url} --model model --num-prompts {num_prompts(streams, args)} "
                f"--max-concurrency {streams} --random-input-len {args.input_len} --ignore-eos --seed {seed} "
                f"--random-output-len {args.output_len} --vocab-size 49152 --num-warmups {streams}".split()
            )
        )
    )
    faults = [outcome.fault for outcome in outcomes if outcome.fault]
    if faults:
        raise RuntimeError(f"{server.name}, {streams} streams: {len(faults)} failed; the first: {faults[0]}")
    return figures


def vllm_client(server: ServerProcess, streams: int, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Figures of one run of vLLM's client."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(args.peers_env / "bin" / "python"), "-P", "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
        command += f"--base-url {server.url} --model {args.model_folder} --served-model-name model".split()
        command += f"--dataset-name random --random-input-len {args.input_len} --ignore-eos".split()
        command += f"--random-output-len {args.output_len} --num-prompts {num_prompts(streams, args)}".split()
        command += f"--max-concurrency {streams} --num-warmups {streams} --seed {seed} --temperature 0".split()
        command += f"--disable-tqdm --save-result --result-dir {folder} --result-filename out.json".split()
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"vllm bench serve: {(done.stderr or done.stdout)[-500:]}")
        figures = json.loads((Path(folder) / "out.json").read_text(encoding="utf-8"))
    if figures["failed"] or figures["total_output_tokens"] != num_prompts(streams, args) * args.output_len:
        raise RuntimeError(
            f"{server.name}, {streams} streams: {figures['failed']} failed, {figures['completed']} whole"
        )
    return figures


def num_prompts(streams: int, args: argparse.Namespace) -> int:
    """Requests in one run."""
    return max(4, streams * args.rounds)


def compare(servers: Sequence[ServerProcess], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every client and number of streams on every server, turn by turn; one row each."""
    clients = {"lean": lean_client, "vllm": vllm_client}
    rows = []
    for client in args.clients:
        for streams in args.streams:
            runs: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
            for repetition in range(args.repeat):
                for server in servers:
                    server.resume()
                    before = server.cpu_seconds()
                    figures = clients[client](server, streams, args, repetition)
                    after = server.cpu_seconds()
                    server.pause()
                    spent = {name: after[name] - before.get(name, 0.0) for name in after}
                    runs[server.name].append(figures | {"cpu_seconds": spent})
                    speed = figures["output_throughput"]
                    print(f"  {client} client, {streams:3d} streams, {server.name}: {speed:.0f} tok/s", flush=True)
            rows += [row(server, client, streams, runs[server.name]) for server in servers]
    return rows


def row(server: ServerProcess, client: str, streams: int, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the runs of one server with one client."""
    return {
        "server": server.name,
        "client": client,
        "streams": streams,
        **{figure: statistics.median(run[figure] for run in runs) for figure in FIGURES},
        "output_throughput_all": [run["output_throughput"] for run in runs],
        "cpu_seconds": [run["cpu_seconds"] for run in runs],
        "start_seconds": server.seconds,
    }


def wide_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each server with each client, output tokens/s; then one for the ratio."""
    columns = {"server": "output tok/s"}
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for item in rows:
        columns[str(item["streams"])] = f"{item['streams']} stream{'s' if item['streams'] > 1 else ''}"
        key = (item["client"], item["server"])
        line = lines.setdefault(key, {"server": f"{item['server']}, {item['client']} client"})
        line[str(item["streams"])] = item["output_throughput"]
    for client in dict.fromkeys(client for client, _ in lines):
        ours, theirs = lines.get((client, "jaxpaged")), lines.get((client, "vllm"))
        if ours and theirs:
            ratio: dict[str, Any] = {"server": f"ratio, {client} client"}
            ratio |= {key: f"{ours[key] / theirs[key]:.2f} x" for key in columns if key != "server"}
            lines[client, "z ratio"] = ratio
    return record.table([lines[key] for key in sorted(lines)], columns)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-env", type=Path, help="a virtual environment that has vLLM for CPU")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 50, 200])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2, help="requests of each stream in one run")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; medians are shown")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--vllm-flags", default="", help="more flags for `vllm serve`")
    parser.add_argument("--jaxpaged-flags", default="", help="more flags for `jaxpaged serve`")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--logs", type=Path, help="keep the servers' own output in this folder")
    args = parser.parse_args()
    if args.peers_env is None and "vllm" in [*args.servers, *args.clients]:
        print("vllm: left out, as server and as client: no --peers-env")
        args.servers, args.clients = (
            [name for name in names if name != "vllm"] for names in (args.servers, args.clients)
        )
    return args


def main() -> None:
    args = arguments()
    # Ended from outside, it must still end the servers, which would stay stopped for ever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as scratch:
        logs = args.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        args.model_folder = Path(scratch) / "model"
        write_model(args.model_folder)
        with started(args, args.model_folder, logs) as servers:
            rows = compare(servers, args)
    settings = {key: getattr(args, key) for key in ("streams", "input_len", "output_len", "rounds", "repeat", "dtype")}
    result = record.record("http_peers", rows, model=CONFIG.stem, **settings, load_average=os.getloadavg()[0])
    print("\n" + wide_table(rows))
    if args.json:
        record.save(result, args.json)


if __name__ == "__main__":
    main()
