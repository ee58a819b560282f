"""How much memory loading a model, its KV pool, a step and an import take, against what they should.

    python -m benchmarks.memory

Each figure is of a process of its own: the peak of its resident memory above what Python and JAX held before. On a CPU
the device's arrays are host memory too, so that loading cannot take less than the weights.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import record

COLUMNS = {
    "what": "what",
    "case": "case",
    "expected_mb": "expected MB",
    "measured_mb": "measured MB",
    "ratio": "measured / expected",
}
_CONFIG = {
    "model_type": "llama",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# Case -> changes of the config, the dtype that is loaded, and the number of files.
LOADS: dict[str, tuple[dict[str, Any], str, int]] = {
    "safetensors bfloat16": ({}, "bfloat16", 1),
    "safetensors bfloat16 to float32": ({}, "float32", 1),
    "safetensors in 4 shards": ({}, "bfloat16", 4),
    "safetensors, tied embeddings": ({"tie_word_embeddings": True}, "bfloat16", 1),
    "safetensors, fused projections (Phi-3)": ({"model_type": "phi3"}, "bfloat16", 1),
}
GGUF = {"GGUF Q8_0 to bfloat16": "bfloat16", "GGUF Q8_0 to float32": "float32"}


def measure_load(case: str, folder: str) -> dict[str, float]:
    """Loads a model; in this process."""
    import jax

    from jaxpaged import models
    from jaxpaged.checkpoint.load import load_params
    from jaxpaged.checkpoint.source import open_model

    dtype = GGUF[case] if case in GGUF else LOADS[case][1]
    source = open_model(folder)
    family = models.get_family(source.config["model_type"])
    config = family.config_from_hf(source.config)
    abstract = models.abstract_params(family.module(config=config, dtype=jax.numpy.dtype(dtype)))
    jax.block_until_ready(jax.device_put(1.0))
    before = reset_peak()
    params = load_params(family.table(config), abstract, source.tensors(), dtype=dtype)
    return _row(sum(leaf.nbytes for leaf in jax.tree.leaves(params)), peak() - before)


def measure_pool(case: str, _: str) -> dict[str, float]:
    """A pool of so many bytes, `case`; the measured bytes are those of the array."""
    from jaxpaged import LLM

    llm = LLM("demo", kv_cache_bytes=int(case), max_num_seqs=64, warmup=False, use_tqdm=False)
    return _row(int(case), llm.engine.runner.kv_pages.nbytes)


def measure_import(_: str, __: str) -> dict[str, float]:
    """What importing jaxpaged and making a config allocates on devices: a backend that was not started has nothing."""
    import jaxpaged

    jaxpaged.EngineConfig(model="demo")
    assert jaxpaged.LLM and jaxpaged.SamplingParams
    from jax._src import xla_bridge  # there is no public way to ask without starting one

    if not xla_bridge.backends_are_initialized():
        return {"expected_mb": 0.0, "measured_mb": 0.0}
    import jax

    return {"expected_mb": 0.0, "measured_mb": sum(array.nbytes for array in jax.live_arrays()) / 1e6}


def measure_step(case: str, _: str) -> dict[str, float]:
    """The largest step, on padding: all that the engine holds then, against what the compiler and the shapes say.

    A step before has compiled what it needs, and no more is compiled. The middle one of three steps counts: the C
    library's heap may grow once by more than a step takes.
    """
    import jax

    from jaxpaged import LLM
    from jaxpaged.device.step_program import program_bytes

    limits: dict[str, Any] = {"max_num_seqs": 32, "kv_cache_bytes": 64 << 20, "max_model_len": 1024}
    runner = LLM("demo", dtype=case, warmup=False, use_tqdm=False, **limits).engine.runner
    bucket = runner.buckets.all[-1]
    runner.run_padding([bucket])
    taken: list[float] = []
    while len(taken) < 3:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier steps have freed
        before = reset_peak()
        runner.run_padding([bucket])
        taken.append(peak() - before)
    held = sum(x.nbytes for x in jax.tree.leaves((runner.params, runner.kv_pages, runner.slots, runner.options)))
    programs = runner.programs[bucket], runner.samplers.full[runner.buckets.result_sizes(bucket).logits]
    return _row(held + sum(sum(program_bytes(program)) for program in programs), held + statistics.median(taken))


MEASURES: dict[str, Callable[[str, str], dict[str, float]]] = {
    "load": measure_load,
    "pool": measure_pool,
    "import": measure_import,
    "step": measure_step,
}


def reset_peak() -> float:
    """Bytes that this process has; from now on `peak` is the most that it has."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def peak() -> float:
    """The most bytes that this process had since `reset_peak`."""
    return _status("VmHWM")


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _row(expected: float, measured: float) -> dict[str, float]:
    return {"expected_mb": expected / 1e6, "measured_mb": measured / 1e6, "ratio": measured / expected}


def write_model(folder: Path, changes: dict[str, Any], shards: int) -> None:
    """A checkpoint of random weights in bfloat16, as Hugging Face has it."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    config = _CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rng = np.random.default_rng(0)
    names = list(_shapes(config).items())
    weight_map = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: rng.random(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in names[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        index = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of every tensor, by Hugging Face's name."""
    d, f, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    fused = config["model_type"] == "phi3"
    projections = {"self_attn.o_proj": (d, d), "mlp.down_proj": (d, f)}
    if fused:
        projections |= {"self_attn.qkv_proj": (d + 2 * kv, d), "mlp.gate_up_proj": (2 * f, d)}
    else:
        projections |= {"self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d)}
        projections |= {"mlp.gate_proj": (f, d), "mlp.up_proj": (f, d)}
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (d,))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, d)
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in (projections | norms).items()}
    return shapes


def in_subprocess(what: str, case: str, folder: str = "") -> dict[str, Any]:
    """One measure in a new process, whose last line of output is its result."""
    command = [sys.executable, "-m", "benchmarks.memory", "--measure", what, case, folder]
    done = subprocess.run(command, cwd=record.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return {"what": what, "case": case} | json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        what, case, folder = args.measure
        print(json.dumps(MEASURES[what](case, folder)))
        return
    rows = []
    for case, (changes, _, shards) in LOADS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), changes, shards)
            rows.append(in_subprocess("load", case, folder))
    rows += [in_subprocess("load", case, "demo") for case in GGUF]
    rows += [in_subprocess("pool", str(size)) for size in (100_000_000, 256 << 20)]
    rows += [in_subprocess("import", "jaxpaged"), *(in_subprocess("step", dtype) for dtype in ("bfloat16", "float32"))]
    print(record.table(rows, COLUMNS))
    if args.json:
        record.save(record.record("memory", rows, model="demo"), args.json)


if __name__ == "__main__":
    main()
