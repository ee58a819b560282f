"""Compiles a model's whole step for a device that need not be there, and reports what it does there.

python -m pallas_kernels.deviceless --device h200 --model llama-3.1-8b --batch 64
python -m pallas_kernels.deviceless --device v6e --model path/to/config.json --batch 32 --mixed 512 --json out.json
python -m pallas_kernels.deviceless --device h200 b200 --model llama-3.1-8b qwen3-8b gemma-3-4b --batch 64 --layers 6

Of several models or devices, one line each is printed; those of sampling are left out.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.deviceless import DEVICES, CompileError, CompilerMissingError, Program, compile_for
from pallas_kernels.deviceless.devices import Gpu
from pallas_kernels.deviceless.report import render, report, report_sampling, table

STEPS = "jaxpaged.device.abstract_step"  # by name: this package does not know that one


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    jax.config.update("jax_platforms", "cpu")
    try:
        steps = importlib.import_module(STEPS)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != STEPS.partition(".")[0]:
            raise
        print(f"a model's step is built by jaxpaged, which is not installed ({error})", file=sys.stderr)
        return 1
    many = len(args.device) * len(args.model) > 1
    found: list[dict[str, Any]] = []
    try:
        for model, device in itertools.product(args.model, args.device):
            found.append(_report(steps, model, device, args, sampling=not many))
            if many:
                print("\n".join(table(found)[0 if len(found) == 1 else -1 :]), flush=True)
    except (ValueError, NotImplementedError, CompileError, CompilerMissingError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if not many:
        print(render(found[0]))
    if args.json:
        args.json.write_text(json.dumps(found if many else found[0], indent=1) + "\n")
    return 0


def _report(steps: Any, model: str, device: str, args: argparse.Namespace, *, sampling: bool) -> dict[str, Any]:
    """What is to be known of a model's step on a device, and of its sampling."""
    target = DEVICES[device]
    step = steps.abstract_step(
        model,
        rows=args.batch,
        tokens=args.mixed,
        platform="gpu" if isinstance(target, Gpu) else "tpu",
        memory=target.memory,
        implementation=args.implementation,
        num_layers=args.layers,
        **_given(args, "pool_bytes", "block_size", "max_model_len", "kv_cache_dtype"),
    )

    def compiled(program: Any) -> Program:
        return compile_for(
            device,
            program.function,
            *program.args,
            donate_argnums=program.donate_argnums,
            compiler_options={**program.compiler_options, **dict(args.xla)},
            row_major=program.row_major,
            may_spill=program.may_spill,
        )

    about = {"model": model, "batch": args.batch, "mixed": args.mixed, "jax": jax.__version__}
    data = about | report(compiled(step.forward), step.num_layers) | {"weight_bytes": step.weight_bytes}
    if sampling:
        data |= {
            "sampling": report_sampling(compiled(step.sample)),
            "plain_sampling": report_sampling(compiled(step.sample_plain)),
        }
    return data


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.deviceless",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", required=True, nargs="+", choices=DEVICES)
    parser.add_argument(
        "--model", required=True, nargs="+", help="a config.json, its folder, or the name of a well-known model"
    )
    parser.add_argument("--batch", type=int, required=True, metavar="ROWS", help="requests in the step")
    parser.add_argument("--mixed", type=int, metavar="TOKENS", help="tokens of a mixed step (default: a decode step)")
    parser.add_argument("--layers", type=int, help="compile this many layers only")
    parser.add_argument("--implementation", help="of the kernels (default: the device's)")
    parser.add_argument("--block-size", type=int, help="tokens of a page")
    parser.add_argument("--pool-bytes", type=int, help="of the KV pages (default: 16 GiB, or what fits)")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument(
        "--xla", type=_option, action="append", default=[], metavar="OPTION=VALUE", help="compiler option"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    return parser.parse_args(argv)


def _option(text: str) -> tuple[str, str | bool]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not OPTION=VALUE")
    return name, {"true": True, "false": False}.get(value, value)


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


if __name__ == "__main__":
    sys.exit(main())
