"""The engines that are compared: which there are, started with one model, and asked in turns."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.jobs import Job, limits
from benchmarks.peer_env import preloads
from benchmarks.peer_process import Peer, PeerFailedError
from jaxpaged.checkpoint.source import open_model
from jaxpaged.models import get_family

# "before" is another checkout of ours, and the only one that is not there unless asked for.
ENGINES = ("before", "jaxpaged", "vllm", "transformers", "llama.cpp")
NEEDS = {"vllm": "vllm", "transformers": "transformers", "llama.cpp": "llama_cpp"}  # what an environment must have
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelFiles:
    """One model in the forms that the engines read.

    Attributes:
      folder: as transformers has it.
      gguf: as llama.cpp has it; None if the model is no such file.
      kv_values: numbers that a token keeps in the KV cache.
      scratch: a folder for what engines make of it, and for their logs.
    """

    folder: Path
    gguf: Path | None
    kv_values: int
    scratch: Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what is compared."""
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--peers-env", type=Path, help="a virtual environment that has the peers")
    parser.add_argument(
        "--baseline", type=Path, metavar="DIR", help='another checkout of jaxpaged: the engine "before"'
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that one run may take")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--logs", type=Path, help="keep the engines' own output in this folder")


@contextlib.contextmanager
def model_files(args: argparse.Namespace) -> Iterator[ModelFiles]:
    """The model, exported to a temporary folder."""
    with tempfile.TemporaryDirectory() as temporary:
        source, folder = open_model(args.model), Path(temporary) / "model"
        export_hf(args.model, folder)
        config = get_family(source.config["model_type"]).config_from_hf(source.config)
        scratch = args.logs or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        gguf = source.path if source.path.is_file() else None
        yield ModelFiles(folder, gguf, 2 * config.num_layers * config.num_kv_heads * config.head_dim, scratch)


def export_hf(model: str, folder: Path) -> None:
    """Writes a model as a folder that transformers and vLLM read: bfloat16 safetensors, config, tokenizer."""
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


def available(args: argparse.Namespace) -> list[str]:
    """The engines asked for that are installed; the others are named."""
    names = []
    for name in args.engines:
        need = NEEDS.get(name)
        site = args.peers_env / "lib" if args.peers_env else None
        if name == "before" and args.baseline is None:
            continue
        if need and not (site and any(site.glob(f"python3.*/site-packages/{need}"))):
            print(f"{name}: left out, {need} is not in --peers-env {args.peers_env}")
            continue
        names.append(name)
    return names


@contextlib.contextmanager
def started(
    names: Sequence[str], args: argparse.Namespace, files: ModelFiles, dtype: str, jobs: Sequence[Job]
) -> Iterator[list[Peer]]:
    """The engines, started one after the other with room for `jobs`, and ended at exit.

    One that fails is named and left out.
    """
    peers: list[Peer] = []
    try:
        for name in names:
            if name == "llama.cpp" and files.gguf is None:
                print(f"{name}: left out, {args.model} is not a GGUF file")
                continue
            print(f"  {dtype}: starting {name}", flush=True)
            try:
                peers.append(_start(name, args, files, dtype, jobs))
            except PeerFailedError as error:
                print(f"{name}, {dtype}: left out: {error}")
        yield peers
    finally:
        for peer in peers:
            peer.close()


def _start(name: str, args: argparse.Namespace, files: ModelFiles, dtype: str, jobs: Sequence[Job]) -> Peer:
    ours = name in ("before", "jaxpaged")
    checkout = args.baseline.resolve() if name == "before" else record.ROOT
    room = limits(jobs)
    job = {
        "engine": "jaxpaged" if ours else name,
        "model": str(files.gguf if name == "llama.cpp" else files.folder),
        "checkout": str(checkout),
        "dtype": dtype,
        **room,
        "kv_bytes": room["kv_tokens"] * files.kv_values * ITEM_BYTES[dtype],
        "threads": len(os.sched_getaffinity(0)),
        "scratch": str(files.scratch),
    }
    python = Path(sys.executable) if ours else args.peers_env / "bin" / "python"
    environment = preloads(args.peers_env) if name == "vllm" else {}
    peer = Peer(name, python, job, environment, log=files.scratch / f"{name}-{dtype}.log")
    if ours:
        commit = record.commit(checkout) if name == "before" else record.COMMIT
        peer.ready["versions"]["jaxpaged"] = record.short(commit)
    return peer


def in_turns(peers: Iterable[Peer], work: Mapping[str, Any], timeout: float) -> Iterator[tuple[Peer, dict[str, Any]]]:
    """Has each engine do a piece of work while the others are stopped; one that fails is named and closed."""
    for peer in peers:
        if peer.closed:
            continue
        try:
            yield peer, peer.run(work, timeout=timeout)
        except PeerFailedError as error:
            print(f"{peer.name}: left out from here on: {error}")
            peer.close()


def counted(runs: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """An engine's runs without the first, in which programs may have run for the first time; or it, if it is alone."""
    return runs[1:] or runs


def row(peer: Peer, job: Job, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One engine's result on one job; medians where there are several runs.

    `step_ms` is the mean time of a step once every request has its first token.
    """
    seconds, first = ([run[key] for run in runs] for key in ("seconds", "first_token_s"))
    steps = [1e3 * (s - f) / (job.output_len - 1) for s, f in zip(seconds, first, strict=True) if job.output_len > 1]
    return {
        "engine": peer.name,
        "job": str(job),
        "title": job.title,
        "num_prompts": job.num_prompts,
        "input_len": job.shared_len + job.own_len,
        "output_tokens_per_s": job.num_prompts * job.output_len / statistics.median(seconds),
        "first_token_s": statistics.median(first),
        "step_ms": statistics.median(steps) if steps else None,
        "seconds": seconds,
        "load_to_first_token_s": peer.ready["seconds"],
        "versions": peer.ready["versions"],
        "notes": peer.ready.get("notes", ""),
    }


def label(row: Mapping[str, Any]) -> str:
    """An engine with its version, or with its commit if it is ours."""
    name = row["engine"]
    own = "jaxpaged" if name == "before" else name.replace(".", "_")
    return f"{name} {row['versions'].get(own, '')}".strip()
