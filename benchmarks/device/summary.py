"""The check's results as a short table: at most 40 lines of 120 columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LINES, COLUMNS = 40, 120

Row = Mapping[str, Any]


def lines(rows: Sequence[Row], stages: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table."""
    by_stage: dict[str, list[Row]] = {
        name: [] for name in ("facts", "correctness", "kernels", "tuned", "model", "torch")
    }
    for row in rows:
        by_stage[row["stage"]].append(row)
    good = {name: {row["name"]: row for row in found if _good(row)} for name, found in by_stage.items()}
    text = [
        *_facts(good["facts"]),
        *_correctness(by_stage["correctness"]),
        *_kernels(good["kernels"], good["tuned"]),
        *_model(good["model"], good["torch"]),
    ]
    took = ", ".join(
        f"{name} {stage['seconds']:.0f} s{'' if stage['status'] == 'done' else ' (' + stage['status'] + ')'}"
        for name, stage in stages.items()
    )
    problems = [
        f"{row['stage']}: {row['name']}: {row.get('error') or 'left out: ' + str(row.get('skipped'))}"
        for row in rows
        if row["stage"] != "correctness" and not _good(row)
    ]
    room = LINES - len(text) - 1
    if len(problems) > room:
        problems = [*problems[: room - 1], f"... and {len(problems) - room + 1} more: see the JSON"]
    return [line[:COLUMNS] for line in [*text, *problems, f"stages: {took}"]]


def _good(row: Row) -> bool:
    return "error" not in row and "skipped" not in row


def _facts(rows: Mapping[str, Row]) -> Iterator[str]:
    if device := rows.get("device"):
        versions = ", ".join(f"{name} {version}" for name, version in device["versions"].items() if name in _SHOWN)
        yield f"{device['kind']} x {device['count']}; {device['driver'] or 'no nvidia-smi'}; {versions}"
    copy, matmul = rows.get("copy"), rows.get("matmul")
    ceilings = []
    if copy:
        ceilings.append(f"copy {_rate(copy['bytes_per_s'])}B/s, read {_rate(copy['read_bytes_per_s'])}B/s")
    if matmul:
        ceilings.append(f"bf16 matmul {_rate(matmul['flops_per_s'])}FLOP/s")
    if ceilings:
        yield f"measured ceilings: {'; '.join(ceilings)}"


_SHOWN = ("jax", "flax", "torch", "transformers")


def _correctness(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    ran = [row for row in rows if "skipped" not in row]
    right = [row for row in ran if row.get("ok")]
    skipped = len(rows) - len(ran)
    yield f"correct: {len(right)} of {len(ran)} cases{f', {skipped} left out' if skipped else ''}"
    bad = [row for row in rows if not row.get("ok")]
    for row in bad[:6]:
        yield f"  {row['name']}: {row.get('why') or row.get('error') or 'left out: ' + str(row.get('skipped'))}"
    if len(bad) > 6:
        yield f"  ... and {len(bad) - 6} more: see the JSON"


def _kernels(rows: Mapping[str, Row], tuned: Mapping[str, Row]) -> Iterator[str]:
    timed = {**rows, **tuned}
    attention = [name for name, row in timed.items() if "of" in row]
    if attention:
        yield f"{'attention':24s} {'us':>9s} {'rate':>9s} {'share':>7s} {'':10s} {'tuned us':>9s} {'share':>7s}"
    for name in attention:
        row, again = rows.get(name), tuned.get(name)
        of = f"of {timed[name]['of']}"
        first = f"{row['us']:9.1f} {_rate(row['rate']):>9s} {_share(row)}" if row else f"{'':27s}"
        yield f"{name:24s} {first} {of:10s} " + (f"{again['us']:9.1f} {_share(again)}" if again else "")
    small = [row for row in rows.values() if "xla_us" in row]
    for op, found in itertools.groupby(sorted(small, key=lambda row: row["name"].split()[0]), lambda row: _op(row)):
        ordered = sorted(found, key=lambda row: int(row["name"].split()[1]))
        times = [f"{row['name'].split()[1]} tokens {row['us']:.1f} ({row['xla_us']:.1f})" for row in ordered]
        yield f"{op}, us (plain XLA): {', '.join(times)}"


def _op(row: Row) -> str:
    return row["name"].split()[0]


def _model(rows: Mapping[str, Row], torch: Mapping[str, Row]) -> Iterator[str]:
    steps = [row for row in rows.values() if "floor_ms" in row]
    if steps:
        head = ("ms", "predicted", "floor ms", "share", "tokens/s", "launch ms", "in graphs", "syncs", "compile s")
        yield f"{'step':28s} " + " ".join(f"{name:>9s}" for name in head)
    for row in steps:
        graphs = f"{row['in_graphs']}/{row['launches']}" if "launches" in row else ""
        predicted, floor = (f"{row[key]:9.2f}" if row.get(key) else f"{'':9s}" for key in ("predicted_ms", "floor_ms"))
        yield (
            f"{row['name']:28s} {row['ms']:9.2f} {predicted} {floor} {_share(row):>9s} {row['tokens_per_s']:9.0f} "
            f"{row['launch_ms']:9.2f} {graphs:>9s} {row.get('syncs', '')!s:>9s} "
            f"{row.get('compile_s', 0):9.1f}{'' if row['finite'] else '  NOT FINITE'}"
        )
    for name, row in rows.items():
        if name.startswith("host"):
            parts = ", ".join(f"{part} {row[f'{part}_ms']:.3f}" for part in ("schedule", "pack", "update"))
            yield f"{name} rows: {parts} ms"
        elif name.startswith("engine"):
            first, step = row["first_token_s"] or 0, row["ms"] or 0
            yield f"{name}: {row['tokens_per_s']:.0f} output tokens/s, first after {first:.2f} s, {step:.2f} ms a step"
    for name, row in torch.items():
        if "ms" in row:
            ours = rows.get(f"decode {name.split()[-1]}")
            beside = f"; ours {row['ms'] / ours['ms']:.2f} times as fast" if ours else ""
            what = name.removeprefix("torch ")
            yield f"transformers, {what}: {row['ms']:.2f} ms, {row['tokens_per_s']:.0f} tokens/s{beside}"


def _share(row: Row) -> str:
    share = row.get("share")
    return f"{100 * share:5.1f} %" if share is not None else f"{'':7s}"


def _rate(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value / 1e6:.4g} M"
