"""The check of a GPU, tried on the CPU: stages that crash or hang, the table, and a whole tiny run."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import device_check, record
from benchmarks.device import launches, stand_ins, summary
from benchmarks.device.worker import Context, Report, read
from jaxpaged.device.abstract_step import AbstractProgram, abstract_step

BAD_STAGE = """
import os, time
def run(report, context):
    report.run("good", lambda: {"value": 1})
    report.run("wrong", lambda: 1 / 0)
    report.run("missing", lambda: __import__("no_such_module"))
    report.run("crash", lambda: os._exit(11))
    report.run("after", lambda: {"seen": [row["name"] for row in context.known]})
    report.run("hang", lambda: time.sleep(60))
    report.run("late", lambda: {"value": 2})
"""


def check(tmp_path: Path, budget: float = 30.0) -> device_check.Check:
    args = argparse.Namespace(budget=budget, tiny=False, implementation="xla", json=str(tmp_path / "out.json"))
    return device_check.Check(args, tmp_path)


def test_a_crash_or_a_hang_costs_one_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_stage.py").write_text(BAD_STAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setattr(device_check, "PACKAGE", "")
    monkeypatch.setattr(device_check, "GRACE", 0.0)
    run = check(tmp_path)
    run.run(device_check.Stage("facts", "bad_stage", 1, patience=1.5))
    rows = {row["name"]: row for row in json.loads((tmp_path / "out.json").read_text())["results"]}
    assert rows["good"]["value"] == 1 and rows["after"]["seen"] == []
    assert rows["wrong"]["error"] == "ZeroDivisionError: division by zero"
    assert rows["missing"]["skipped"].startswith("ModuleNotFoundError")
    assert "ended with 11" in rows["crash"]["error"]
    assert "took too long" in rows["hang"]["error"]
    assert rows["late"]["value"] == 2 and run.stages["facts"]["status"] == "done"


def test_a_stage_has_its_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_stage.py").write_text(BAD_STAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(device_check, "PACKAGE", "")
    monkeypatch.setattr(device_check, "GRACE", 0.0)
    run = check(tmp_path, budget=6.0)
    run.run(device_check.Stage("facts", "bad_stage", 1, patience=99), later=1.0)
    assert run.stages["facts"]["seconds"] < 5 and run.stages["facts"]["status"] == "took too long"


def test_items_without_time_are_left_out(tmp_path: Path) -> None:
    report = Report(tmp_path / "rows", ["done"], seconds=100)
    report.run("done", lambda: {"value": 0})
    report.run("long", lambda: {"value": 1}, needs=101)
    report.run_prepared({"pair": lambda: lambda: {"value": 2}}, threads=1)
    rows, begun = read(tmp_path / "rows")
    assert [(row["name"], row.get("value")) for row in rows] == [("long", None), ("pair", 2)]
    assert rows[0]["skipped"] == "no time left" and begun is None


def test_facts_of_earlier_stages_are_found() -> None:
    known: list[dict[str, Any]] = [{"name": "copy", "error": "x"}, {"name": "copy", "bytes_per_s": 4e12}]
    context = Context(True, "xla", known, Path(), None)
    assert context.fact("copy", "bytes_per_s") == 4e12 and context.fact("matmul", "flops_per_s") is None


SMALL = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
THUNKS = """\
000: kCommandBuffer [source       | next=097 (1)]
    001: kCopy         [source       | next=004 (3)] kCopy
    051: kConditional  [prev=047 (1) | next=052 (1)]
      true_branch:
        050: kCustomKernel [source | sink] name grid: [1, 1, 1]
097: kConditional   [prev=000 (1) | next=098 (1)]
  true_branch:
    057: kCustomKernel  [source       | next=058 (1)] name grid: [1, 1, 1]
098: kCustomKernel  [prev=097 (1) | sink        ] name grid: [1, 1, 1]
"""


def test_launches_in_and_outside_graphs_are_told_apart(tmp_path: Path) -> None:
    def step() -> None: ...

    with pytest.raises(FileNotFoundError, match="jit_step"):
        launches.count(tmp_path, step)
    (tmp_path / "module_1.jit_step.thunk_sequence.txt").write_text("001: kCopy [source | sink] kCopy\n")
    (tmp_path / "module_2.jit_step_two.thunk_sequence_after_thunk_passes.txt").write_text("")
    assert launches.count(tmp_path, step)["launches"] == 1
    (tmp_path / "module_1.jit_step.thunk_sequence_after_thunk_passes.txt").write_text(THUNKS)
    found = launches.count(tmp_path, step)
    assert (found["graphs"], found["launches"], found["in_graphs"], found["syncs"]) == (1, 4, 2, 1)
    assert found["kinds"] == {"CustomKernel": 3, "Copy": 1}


@pytest.mark.parametrize("kind", ["forward", "sample_plain"])
def test_the_engines_programs_are_dumped_under_the_names_that_are_looked_for(tmp_path: Path, kind: str) -> None:
    program: AbstractProgram = getattr(abstract_step(SMALL, rows=1, platform="cpu", pool_bytes=1 << 16), kind)
    lowered = jax.jit(program.function, donate_argnums=program.donate_argnums).lower(*program.args)
    lowered.compile(launches.dump_options(tmp_path, program.function))
    (found,) = tmp_path.glob("*.cpu_after_optimizations.txt")  # no thunks, but named as they are
    thunks = Path(str(found).replace("cpu_after_optimizations", "thunk_sequence"))
    thunks.write_text("")
    with pytest.raises(ValueError, match="no thunks"):
        launches.count(tmp_path, program.function)
    thunks.write_text(THUNKS)
    assert launches.count(tmp_path, program.function)["launches"] == 4


def test_the_stand_in_for_msgspec_is_enough_for_a_step() -> None:
    """As on a machine that has jax and flax, and little else."""
    code = (
        "import sys\n"
        f"for name in {['msgspec', 'gguf', 'pydantic', 'fastapi', 'uvicorn', 'starlette']}: sys.modules[name] = None\n"
        "del sys.modules['msgspec']\n"
        "from importlib import util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'msgspec' else find(name, *rest)\n"
        "from benchmarks.device import correctness, kernel_times, model, tuned_times, torch_decode, ceilings\n"
        "assert model.STAND_INS == ['msgspec']\n"
        "assert model.SamplingParams(temperature=0.0, max_tokens=3).greedy\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=record.ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "msgspec" not in stand_ins.install()


def test_the_table_is_short_whatever_happened() -> None:
    long = "x" * 500
    rows = [{"stage": "correctness", "name": f"{i} {long}", "error": long} for i in range(60)]
    rows += [
        {"stage": "kernels", "name": f"decode {i}", "us": 12.5, "rate": 4e12, "of": "copy", "share": 0.93} for i in "ab"
    ]
    rows += [{"stage": "model", "name": f"{i}", "error": long} for i in range(60)]
    lines = summary.lines(rows, {"kernels": {"seconds": 3.0, "status": "out of time"}})
    assert len(lines) == summary.LINES and max(map(len, lines)) <= summary.COLUMNS
    assert any("4 T" in line and "93.0 %" in line for line in lines)
    assert "correct: 0 of 60" in lines[0] and lines[-1] == "stages: kernels 3 s (out of time)"
    assert summary.lines([], {})[-1].startswith("stages")


def test_a_machine_without_a_gpu_is_told_so_at_once() -> None:
    with pytest.raises(SystemExit, match="no GPU here"):
        device_check.main([])


@pytest.mark.slow
def test_a_tiny_run_goes_to_the_end(tmp_path: Path) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OUT": str(tmp_path), "PYTHON": sys.executable}
    script = record.ROOT / "benchmarks" / "device_check.sh"
    done = subprocess.run(["bash", str(script), "--tiny"], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "device_check.json").read_text())
    assert result["benchmark"] == "device_check" and result["settings"]["tiny"]
    assert [*result["stages"]] == [stage.name for stage in device_check.STAGES]
    assert {stage["status"] for stage in result["stages"].values()} == {"done"}
    rows = {(row["stage"], row["name"]): row for row in result["results"]}
    assert not [row for row in rows.values() if "error" in row]
    assert rows["facts", "copy"]["bytes_per_s"] > 0 and rows["facts", "matmul"]["flops_per_s"] > 0
    assert all(row["ok"] for (stage, _), row in rows.items() if stage == "correctness")
    for stage in ("kernels", "tuned"):
        assert rows[stage, "decode 2 x 40"]["us"] > 0 and rows[stage, "prefill 1 x 24"]["share"] > 0
    assert [entry["kernel"] for entry in rows["tuned", "tune"]["entries"]] == ["decode", "prefill"]
    decode, engine = rows["model", "decode 2"], rows["model", "engine 2 x 12"]
    assert decode["finite"] and decode["ms"] > 0 and decode["share"] > 0
    assert decode["ratio"] == pytest.approx(decode["ms"] / decode["predicted_ms"]) and decode["flops"] > 0
    assert engine["output_tokens"] == 8 and engine["compiled"] == 0
    assert (tmp_path / "tuned" / "cpu" / "ragged_paged_attention.json").exists()
    assert len(done.stdout.splitlines()) <= summary.LINES
