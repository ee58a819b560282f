"""The report on a step: launches of a layer and outside of the layers, copies, memory; as data and as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.deviceless.program import Launch, Program

_LAYER = re.compile(r"/layers_(\d+)/")


def layer_launches(program: Program, num_layers: int) -> list[tuple[Launch, ...]]:
    """The launches of each layer: those that stem from ".../layers_{i}/...", and those of no source that follow them.

    Raises ValueError if a layer has none.
    """
    layers: list[list[Launch]] = [[] for _ in range(num_layers)]
    layer = None
    for launch in program.launches:
        if launch.source:
            match = _LAYER.search(launch.source)
            layer = int(match[1]) if match else None
        if layer is not None and layer < num_layers:
            layers[layer].append(launch)
    if missing := [i for i, launches in enumerate(layers) if not launches]:
        raise ValueError(f"no launch stems from the layers {missing}: is the step made of `layers_0`, ...?")
    return [tuple(launches) for launches in layers]


def typical_layer(program: Program, num_layers: int) -> tuple[Launch, ...]:
    """The launches of a layer of the length that most have, but for the first, which also has what all layers share."""
    layers = layer_launches(program, num_layers)
    later = layers[1:] or layers
    length = Counter(len(layer) for layer in later).most_common(1)[0][0]
    return next(layer for layer in later if len(layer) == length)


def report(program: Program, num_layers: int) -> dict[str, Any]:
    """What is to be known of a step of `num_layers` layers, ready for JSON; sizes in bytes."""
    layer = typical_layer(program, num_layers)
    layers = layer_launches(program, num_layers)
    counts = [len(launches) for launches in layers[1:] or layers]
    always = sum(not launch.inside for launch in program.launches) - sum(
        not launch.inside for launches in layers for launch in launches
    )
    kernels = {launch.name: launch.shared_memory for launch in program.launches if launch.shared_memory}
    return {
        "device": program.device,
        "layers": num_layers,
        "seconds": round(program.seconds, 1),
        "launches": len(program.launches),
        "launches_per_layer": len(layer),
        "launches_per_layer_range": [min(counts), max(counts)],
        "launches_outside_layers": len(program.launches) - sum(map(len, layers)),
        "launches_outside_layers_always": always,
        "layer": [launch._asdict() for launch in layer],
        "copied_argument_bytes": program.copied_argument_bytes,
        "copied_arguments": sorted({copy.argument for copy in program.copies if copy.argument}),
        "copied_bytes": program.copied_bytes,
        "copies": [copy._asdict() for copy in program.copies],
        "argument_bytes": program.argument_bytes,
        "aliased_bytes": program.aliased_bytes,
        "temporary_bytes": program.temporary_bytes,
        "temporaries": [buffer._asdict() for buffer in program.temporaries[:10]],
        "spills": program.spills,
        "max_shared_memory": max(kernels.values(), default=0),
        "shared_memory": kernels,
    }


def report_sampling(program: Program) -> dict[str, Any]:
    """What is to be known of the program that turns a step's logits into tokens; sizes in bytes."""
    return {
        "seconds": round(program.seconds, 1),
        "launches": len(program.launches),
        "launches_always": sum(not launch.inside for launch in program.launches),
        "copied_argument_bytes": program.copied_argument_bytes,
        "temporary_bytes": program.temporary_bytes,
        "spills": program.spills,
    }


def render(data: dict[str, Any]) -> str:
    """The report as text; of the sampling, too, if `data` has it."""
    low, high = data["launches_per_layer_range"]
    spread = "" if low == high else f" (between {low} and {high})"
    lines = [
        f"{data['device']}, {data['layers']} layers, compiled in {data['seconds']} s",
        f"launches per layer           {data['launches_per_layer']}{spread}",
        f"launches outside the layers  {data['launches_outside_layers']}, "
        f"{data['launches_outside_layers_always']} of them in every step",
        f"arguments copied             {data['copied_argument_bytes']:,} bytes"
        + (f", of {', '.join(data['copied_arguments'][:4])}" if data["copied_arguments"] else ""),
        f"other copies                 {data['copied_bytes'] - data['copied_argument_bytes']:,} bytes",
        f"arguments                    {data['argument_bytes']:,} bytes, "
        f"{data['aliased_bytes']:,} of them updated in place",
        f"temporaries                  {data['temporary_bytes']:,} bytes",
        f"shared memory of a block     {data['max_shared_memory']:,} bytes at most",
        f"register spills              {data['spills'] or 'none'}",
        *_render_sampling("sampling, a program apart", data.get("sampling")),
        *_render_sampling("  if no row uses features", data.get("plain_sampling")),
        "",
        "one layer:",
    ]
    for launch in data["layer"]:
        grid, threads = ("x".join(map(str, launch[key])) for key in ("grid", "threads"))
        name = launch["name"] + (f" (in {launch['inside']})" if launch["inside"] else "")
        lines.append(
            f"  {name:45} {grid:>12} {threads:>10} {launch['shared_memory']:>8,} B  {_short(launch['source'])}"
        )
    lines += ["", "largest copies:"]
    lines += [
        f"  {copy['bytes']:>14,} B  {copy['shape']:30} {copy['name']} {copy['argument'] or _short(copy['source'])}"
        for copy in data["copies"][:5]
    ]
    lines += ["", "largest temporaries:"]
    lines += [f"  {b['bytes']:>14,} B  {b['shape']:30} {b['name']}" for b in data["temporaries"][:5]]
    return "\n".join(lines)


def table(reports: Sequence[dict[str, Any]]) -> list[str]:
    """A heading, and a line per report; temporaries are beside the weights of the whole model, `weight_bytes`."""
    lines = [
        f"{'model':20} {'device':6} {'step':>12} {'launches':>9} {'outside':>8} {'copied':>10} {'temporaries':>12} "
        f"{'of weights':>10} {'spills':>7} {'seconds':>8}"
    ]
    for data in reports:
        low, high = data["launches_per_layer_range"]
        step = f"{data['mixed']} x {data['batch']}" if data["mixed"] else f"{data['batch']}"
        lines.append(
            f"{Path(data['model']).name:20} {data['device']:6} {step:>12} "
            f"{str(low) if low == high else f'{low}-{high}':>9} {data['launches_outside_layers']:>8} "
            f"{data['copied_bytes']:>8,} B {data['temporary_bytes'] / 1e6:>9.1f} MB "
            f"{data['temporary_bytes'] / data['weight_bytes']:>10.2%} {len(data['spills']) or 'none':>7} "
            f"{data['seconds']:>8}"
        )
    return lines


def _render_sampling(title: str, data: dict[str, Any] | None) -> list[str]:
    if data is None:
        return []
    return [
        f"{title:28s} {data['launches']} launches, {data['launches_always']} of them in every step; "
        f"temporaries of {data['temporary_bytes']:,} bytes; compiled in {data['seconds']} s"
    ]


def _short(source: str) -> str:
    """A source without what all have in common."""
    return source.rpartition("/layers_")[2].partition("/")[2] if "/layers_" in source else source.partition("/")[2]
