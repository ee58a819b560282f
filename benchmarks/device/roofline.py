"""Predicts how long a model's step takes on a GPU that need not be there, from its bytes and FLOPs.

    python -m benchmarks.device.roofline --model llama-3.1-8b --device h200 --rows 64 --context 2048
    python -m benchmarks.device.roofline --model path/to/config.json --device b200 --rows 63 --chunk 2048
    python -m benchmarks.device.roofline --json

Each operation takes as long as its bytes or its products need, whichever is longer, at the rates of `ceilings` times
an efficiency, and a moment for each launch. The host is left out, for it works ahead; so is padding. Without
`--model` and `--device` all of `MODELS` and `DEVICES` are compared, from one row to many; `--json` puts that on file.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks import record
from benchmarks.device.work import Op, Work, step_rows, work
from pallas_kernels.deviceless.devices import DEVICES as TARGETS
from pallas_kernels.deviceless.devices import Gpu

MODELS = ("llama-3.1-8b", "qwen3-8b", "gemma-3-12b")
DEVICES = ("h100", "h200", "b200")
CURVE = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# Dense products in bfloat16 or float16, FLOP/s, by NVIDIA's data sheets; other facts are in `deviceless.devices`.
TENSOR_FLOPS = {"a100": 312e12, "l4": 121e12, "h100": 989e12, "h200": 989e12, "b200": 2250e12}
# Measured on an H200: a large copy, bytes read and written per second; large bfloat16 products, FLOP/s.
H200_COPY, H200_MATMUL = 4.3e12, 784e12

# Assumed, not measured: the share of a ceiling that an operation reaches (of bytes, of FLOPs).
EFFICIENCY: dict[str, tuple[float, float]] = {
    "product": (0.85, 0.85),
    "attend": (0.85, 0.5),
    "other": (0.7, 0.1),
}
LAUNCH_SECONDS = 2e-6  # assumed: what a kernel of a CUDA graph takes to begin and to end


class Ceilings(NamedTuple):
    """What a device can do at most.

    Attributes:
      bandwidth: bytes/s of its memory.
      flops: FLOP/s of products in bfloat16 or float16; flops_float32: in float32, which is never cut to TF32.
      memory: bytes.
      source: of the numbers.
    """

    bandwidth: float
    flops: float
    flops_float32: float
    memory: int
    source: str


def ceilings(device: str) -> Ceilings:
    """Those of a device, by its name in `pallas_kernels.deviceless`; raises ValueError if it is no GPU known here."""
    target = TARGETS.get(device)
    if not isinstance(target, Gpu) or device not in TENSOR_FLOPS:
        raise ValueError(f"no ceilings of {device!r} are known, only those of {', '.join(TENSOR_FLOPS)}")
    h200 = TARGETS["h200"]
    assert isinstance(h200, Gpu)
    source = "measured" if device == "h200" else "data sheet, times what an H200 reached of its own"
    return Ceilings(
        bandwidth=target.bandwidth * H200_COPY / h200.bandwidth,
        flops=TENSOR_FLOPS[device] * H200_MATMUL / TENSOR_FLOPS["h200"],
        flops_float32=2e9 * target.cores * target.fpus_per_core * target.clock,
        memory=target.memory,
        source=source,
    )


def predict(step: Work, limits: Ceilings) -> dict[str, Any]:
    """Time of a step.

    Returns:
      `ms`; `floor_ms`, without launches and with every ceiling reached; `tokens_per_s`, of the rows; `bytes`, `flops`,
      `launches`; `fits`, whether nine tenths of the memory hold weights, keys and values; `ops`, a row for each.
    """
    ops = [_op_time(op, limits, step.dtype) for op in step.ops()]
    seconds = sum(row["us"] for row in ops) / 1e6
    return {
        "ms": 1e3 * seconds,
        "floor_ms": sum(row["floor_us"] for row in ops) / 1e3,
        "tokens_per_s": len(step.rows) / seconds,
        "tokens": step.tokens,
        **{name: sum(row[name] for row in ops) for name in ("bytes", "flops", "launches")},
        "fits": step.memory <= 0.9 * limits.memory,
        "ops": ops,
    }


def _op_time(op: Op, limits: Ceilings, dtype: str) -> dict[str, Any]:
    """A row of the table, for all `op.count`."""
    of_bytes, of_flops = EFFICIENCY[op.kind]
    rate = limits.flops_float32 if dtype == "float32" else limits.flops
    memory, products = op.bytes / limits.bandwidth, op.flops / rate
    waits = {"memory": memory / of_bytes, "products": products / of_flops}
    launches = op.launches * LAUNCH_SECONDS
    bound = max(waits, key=waits.__getitem__)
    return {
        "op": op.name,
        "count": op.count,
        "bytes": op.count * op.bytes,
        "weight_bytes": op.count * op.weights,
        "cache_bytes": op.count * op.cache,
        "flops": op.count * op.flops,
        "launches": op.count * op.launches,
        "bound_by": "launches" if launches > waits[bound] else bound,
        "floor_us": 1e6 * op.count * max(memory, products),
        "us": 1e6 * op.count * (waits[bound] + launches),
    }


def table(found: Mapping[str, Any]) -> str:
    """A step, an operation a line."""
    total = {"op": "step", **found, "us": 1e3 * found["ms"], "floor_us": 1e3 * found["floor_ms"]}
    rows = [
        row | {"MB": row["bytes"] / 1e6, "GFLOP": row["flops"] / 1e9, "share": f"{row['us'] / total['us']:.1%}"}
        for row in (*found["ops"], total)
    ]
    columns = ("op", "count", "MB", "GFLOP", "launches", "bound_by", "floor_us", "us", "share")
    return record.table(rows, {name: name.replace("_", " ") for name in columns})


def curve(models: Sequence[str], devices: Sequence[str], counts: Sequence[int], context: int) -> list[dict[str, Any]]:
    """Decode steps of every model on every device, a row for each number of rows."""
    found = []
    for model in models:
        step = work(model, [])
        for rows in counts:
            step = replace(step, rows=tuple(step_rows(rows, context)))
            for device in devices:
                row = predict(step, ceilings(device))
                del row["ops"]
                found.append({"model": model, "device": device, "rows": rows, "context": context} | row)
    return found


def curve_table(found: Sequence[Mapping[str, Any]]) -> str:
    """Tokens per second, a number of rows a column; blank where keys and values do not fit."""
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for row in found:
        line = lines.setdefault(
            (row["model"], row["device"]), {"model": Path(row["model"]).name, "device": row["device"]}
        )
        line[str(row["rows"])] = row["tokens_per_s"] if row["fits"] else None
    counts = {str(row["rows"]): str(row["rows"]) for row in found}
    return record.table(list(lines.values()), {"model": "tokens/s with rows:", "device": "", **counts})


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=MODELS, help="names of models, or paths of config.json files")
    parser.add_argument("--device", nargs="+", choices=TENSOR_FLOPS, default=DEVICES)
    parser.add_argument("--rows", type=int, default=64, help="that decode, in the step shown by operation")
    parser.add_argument("--context", type=int, default=2048, help="keys of each of these")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a prompt beside them")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--kv-cache-dtype", help="default: that of the weights")
    default = record.RESULTS / "roofline.json"
    parser.add_argument("--json", type=Path, nargs="?", const=default, help=f"file for all of it (default: {default})")
    args = parser.parse_args(argv)
    if min(args.rows, args.context) < 1 or args.chunk < 0:
        parser.error("--rows and --context must be at least 1, --chunk at least 0")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    jax.config.update("jax_platforms", "cpu")
    steps = []
    for model in args.model:
        rows = step_rows(args.rows, args.context, args.chunk)
        step = work(model, rows, dtype=args.dtype, cache_dtype=args.kv_cache_dtype)
        for device in args.device:
            limits = ceilings(device)
            found = predict(step, limits)
            steps.append({"model": model, "device": device, "ceilings": limits._asdict()} | found)
            title = f"{Path(model).name} on {device}: {args.rows} rows after {args.context} tokens"
            chunk = f" and {args.chunk} tokens of a prompt" if args.chunk else ""
            fits = "" if found["fits"] else "; keys and values do not fit"
            print(f"{title}{chunk}: {found['ms']:.2f} ms, {found['tokens_per_s']:,.0f} tokens/s{fits}", flush=True)
    if len(steps) == 1:
        print(table(steps[0]))
    points = curve(args.model, args.device, CURVE, args.context)
    print(curve_table(points))
    if args.json:
        assumed = {"efficiency": EFFICIENCY, "launch_seconds": LAUNCH_SECONDS}
        settings = {name: getattr(args, name) for name in ("rows", "context", "chunk", "dtype", "kv_cache_dtype")}
        record.save(record.record("roofline", points, assumed=assumed, **settings) | {"steps": steps}, args.json)


if __name__ == "__main__":
    main()
