"""The report on a step: launches of a layer and outside of the layers, copies, memory; as data and as text."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

from pallas_kernels.deviceless.program import Launch, Program

_LAYER = re.compile(r"/layers_(\d+)/")


def layer_launches(program: Program, num_layers: int) -> list[tuple[Launch, ...]]:
    """The launches of each layer: from the first that stems from ".../layers_{i}/..." up to the next layer's first.

    What lies before layer 0 belongs to none. The last layer runs to its own last launch.

    Raises ValueError if a layer has none.
    """
    layers = [int(match[1]) if (match := _LAYER.search(launch.source)) else None for launch in program.launches]
    missing = set(range(num_layers)) - set(layers)
    if missing:
        raise ValueError(f"no launch stems from the layers {sorted(missing)}: is the step made of `layers_0`, ...?")
    bounds = [layers.index(i) for i in range(num_layers)]
    bounds.append(len(layers) - layers[::-1].index(num_layers - 1))
    return [program.launches[begin:end] for begin, end in itertools.pairwise(bounds)]


def typical_layer(program: Program, num_layers: int) -> tuple[Launch, ...]:
    """The launches of a layer in the middle, of the length that most there have.

    The first layer also has what all layers share, and the last one shares kernels with what follows.
    """
    layers = layer_launches(program, num_layers)
    middle = layers[1:-1] or layers
    length = Counter(len(layer) for layer in middle).most_common(1)[0][0]
    return next(layer for layer in middle if len(layer) == length)


def report(program: Program, num_layers: int) -> dict[str, Any]:
    """What is to be known of a step of `num_layers` layers, ready for JSON; sizes in bytes."""
    layer = typical_layer(program, num_layers)
    counts = [len(launches) for launches in layer_launches(program, num_layers)]
    middle = counts[1:-1] or counts
    kernels = {launch.name: launch.shared_memory for launch in program.launches if launch.shared_memory}
    return {
        "device": program.device,
        "layers": num_layers,
        "seconds": round(program.seconds, 1),
        "launches": len(program.launches),
        "launches_per_layer": len(layer),
        "launches_per_layer_range": [min(middle), max(middle)],
        "launches_outside_layers": len(program.launches) - sum(counts),
        "launches_outside_layers_always": sum(1 for launch in _outside(program, num_layers) if not launch.inside),
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


def _outside(program: Program, num_layers: int) -> tuple[Launch, ...]:
    """The launches before the first layer and after the last one."""
    layers = layer_launches(program, num_layers)
    begin = program.launches.index(layers[0][0])
    return program.launches[:begin] + program.launches[begin + sum(map(len, layers)) :]


def render(data: dict[str, Any]) -> str:
    """The report as text."""
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


def _short(source: str) -> str:
    """A source without what all have in common."""
    return source.rpartition("/layers_")[2].partition("/")[2] if "/layers_" in source else source.partition("/")[2]
