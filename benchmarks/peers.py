"""The same work on jaxpaged and on its peers, in one run on one machine.

    python -m benchmarks.peers --make-env ~/peers            # once: vLLM for CPU, transformers, torch (several GB)
    python -m benchmarks.peers --peers-env ~/peers --json benchmarks/results/peers.json

Every engine is a process of its own with its model loaded. They take turns, repetition by repetition, and whoever is
not measured is stopped (SIGSTOP), so that a drift of the machine meets them all and nobody's idle threads cost another
anything. Work: N prompts of random ids, the same for all, greedy, the end of the sequence ignored. Medians are shown.
Engines that are not installed are left out and named.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.peer_env import make_env, preloads
from benchmarks.peer_process import Peer, PeerFailedError
from jaxpaged.checkpoint.source import open_model

ENGINES = ("jaxpaged", "vllm", "transformers", "llama.cpp")
NEEDS = {"vllm": "vllm", "transformers": "transformers", "llama.cpp": "llama_cpp"}  # what an environment must have


def export_hf(model: str, folder: Path) -> None:
    """Writes a model as a folder that transformers and vLLM read: bfloat16 safetensors, config, tokenizer."""
    import json

    import ml_dtypes
    from safetensors.numpy import save_file
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from jaxpaged.text.tokenizer import Tokenizer

    source = open_model(model)
    tied = bool(source.config.get("tie_word_embeddings"))
    tensors = {
        name: tensor.read().astype(ml_dtypes.bfloat16)
        for name, tensor in source.tensors().items()
        if not (tied and name == "lm_head.weight")
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[source.config["model_type"]]
    config = source.config | {"torch_dtype": "bfloat16", "architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    Tokenizer.from_source(source).hf.save_pretrained(folder)


@contextlib.contextmanager
def started(
    names: Sequence[str], args: argparse.Namespace, dtype: str, model: str, gguf: str | None
) -> Iterator[list[Peer]]:
    """The engines, started one after the other and ended at exit; one that fails is named and left out."""
    peers: list[Peer] = []
    try:
        for name in names:
            if name == "llama.cpp" and gguf is None:
                print(f"{name}: left out, {args.model} is not a GGUF file")
                continue
            python = Path(sys.executable) if name == "jaxpaged" else args.peers_env / "bin" / "python"
            job = {
                "engine": name,
                "model": gguf if name == "llama.cpp" else model,
                "dtype": dtype,
                "max_prompts": max(args.num_prompts),
                "max_len": args.input_len + args.output_len,
                "threads": len(os.sched_getaffinity(0)),
                "scratch": args.scratch,
            }
            environment = preloads(args.peers_env) if name == "vllm" else {}
            print(f"  {dtype}: starting {name}", flush=True)
            try:
                peers.append(Peer(name, python, job, environment, log=Path(args.scratch) / f"{name}-{dtype}.log"))
            except PeerFailedError as error:
                print(f"{name}, {dtype}: left out: {error}")
        yield peers
    finally:
        for peer in peers:
            peer.close()


def compare(peers: list[Peer], args: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """Measures every job on every engine, turn by turn; one row an engine and job."""
    rows = []
    for count in args.num_prompts:
        work = {"num_prompts": count, "input_len": args.input_len, "output_len": args.output_len}
        seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
        tokens: dict[str, list[list[int]]] = {}
        for repetition in range(args.repeat):
            for peer in list(peers):
                try:
                    reply = peer.run(work | {"seed": repetition}, timeout=args.timeout)
                except PeerFailedError as error:
                    print(f"{peer.name}, {dtype}: left out from here on: {error}")
                    peer.close()
                    peers.remove(peer)
                    continue
                seconds[peer.name].append(reply["seconds"])
                tokens[peer.name] = reply["token_ids"]
                speed = count * args.output_len / reply["seconds"]
                print(f"  {dtype} {count:3d} requests, {peer.name}: {speed:.1f} tok/s", flush=True)
        rows += [row(peer, work | {"dtype": dtype}, seconds[peer.name], tokens, peers[0].name) for peer in peers]
    return rows


def row(
    peer: Peer, work: Mapping[str, Any], seconds: list[float], tokens: Mapping[str, list[list[int]]], first: str
) -> dict[str, Any]:
    """One engine's result on one job. `same_tokens` is the share of tokens before the first that differs from
    the first engine's: near 1 in float32 if all run the same model."""
    median = statistics.median(seconds)
    return {
        "engine": peer.name,
        **work,
        "output_tokens_per_s": work["num_prompts"] * work["output_len"] / median,
        "seconds": seconds,
        "same_tokens": agreement(tokens[peer.name], tokens[first]),
        "load_to_first_token_s": peer.ready["seconds"],
        "versions": peer.ready["versions"],
        "notes": peer.ready.get("notes", ""),
    }


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of positions, over all outputs, that come before the first difference."""
    total = same = 0
    for a, b in zip(ours, theirs, strict=True):
        total += len(b)
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / total if total else 0.0


def wide_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line an engine; a column for each dtype and number of requests."""
    columns = {"engine": "output tok/s"}
    lines: dict[str, dict[str, Any]] = {}
    for item in rows:
        key = f"{item['dtype']} {item['num_prompts']}"
        plural = "request" if item["num_prompts"] == 1 else "requests"
        columns[key] = f"{item['dtype']}, {item['num_prompts']} {plural}"
        name = item["engine"]
        version = item["versions"].get(name.replace(".", "_"), "")
        line = lines.setdefault(name, {"engine": f"{name} {version}".strip()})
        line[key] = item["output_tokens_per_s"]
        line["load"] = max(line.get("load", 0.0), item["load_to_first_token_s"])
    columns["load"] = "start to first token, s"
    return record.table(list(lines.values()), columns)


def available(args: argparse.Namespace) -> list[str]:
    """The engines asked for that are installed."""
    names = []
    for name in args.engines:
        need = NEEDS.get(name)
        site = args.peers_env / "lib" if args.peers_env else None
        if need and not (site and any(site.glob(f"python3.*/site-packages/{need}"))):
            print(f"{name}: left out, {need} is not in --peers-env {args.peers_env}")
            continue
        names.append(name)
    return names


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--num-prompts", type=int, nargs="+", default=[32, 1])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--peers-env", type=Path, help="a virtual environment that has the peers")
    parser.add_argument("--make-env", type=Path, metavar="DIR", help="make such an environment in DIR, and stop")
    parser.add_argument("--llama-cpp", action="store_true", help="with --make-env: build llama.cpp too (minutes)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that one run may take")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--logs", type=Path, help="keep the engines' own output in this folder")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    # Ended from outside, it must still end the engines, which would stay stopped for ever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if args.make_env:
        make_env(args.make_env, llama_cpp=args.llama_cpp)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        args.scratch = str(args.logs or scratch)
        Path(args.scratch).mkdir(parents=True, exist_ok=True)
        names = available(args)
        folder = Path(scratch) / "model"
        export_hf(args.model, folder)
        gguf = open_model(args.model).path
        for dtype in args.dtypes:
            with started(names, args, dtype, str(folder), str(gguf) if gguf.is_file() else None) as peers:
                rows += compare(peers, args, dtype)
    result = record.record(
        "peers",
        rows,
        model=args.model,
        input_len=args.input_len,
        output_len=args.output_len,
        repeat=args.repeat,
    )
    machine = result["machine"]
    print(f"\n{args.model}, {args.input_len} in, {args.output_len} out; {machine['cpu']}, {machine['cores']} cores")
    print(wide_table(rows))
    if args.json:
        record.save(result, args.json)


if __name__ == "__main__":
    main()
