"""The scaling curves as a picture: three axes, a line an engine. Needs matplotlib (`pip install jaxpaged[bench]`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks import record
from benchmarks.peer_group import label


@dataclass(frozen=True)
class Axis:
    """What one of the pictures shows: a row's figure against one of its numbers, for the rows of one curve.

    Attributes:
      scale: what the figure is multiplied with to be in the unit of `y_label`.
      y_scale: "log" where it spans magnitudes; "linear" starts at 0.
    """

    curve: str
    title: str
    x: str
    x_label: str
    y: str
    y_label: str
    scale: float = 1.0
    y_scale: str = "log"


AXES = (
    Axis("requests", "Throughput", "num_prompts", "requests at once", "output_tokens_per_s", "output tokens/s"),
    Axis("tokens", "Time to first token", "input_len", "prompt, tokens", "first_token_s", "ms", 1e3),
    Axis("tokens", "Time of a decode step", "input_len", "context, tokens", "step_ms", "ms", y_scale="linear"),
)
# An engine looks the same in every picture: a colour that shows on both grounds, and a mark for those who see none.
LOOKS = {
    "before": ("#8c8c8c", "D"),
    "jaxpaged": ("#e4572e", "o"),
    "vllm": ("#3a86d4", "s"),
    "transformers": ("#b8860b", "^"),
    "llama.cpp": ("#2a9d5c", "v"),
}
THEMES = {"light": ("#ffffff", "#1f2328", "#d8dee4"), "dark": ("#0d1117", "#e6edf3", "#30363d")}  # ground, ink, grid


def draw(result: Mapping[str, Any], path: Path, theme: str) -> None:
    """Writes a record of `benchmarks.scaling` as a PNG.

    Args:
      theme: "light" or "dark", the page that it is shown on.
    """
    ground, ink, grid = THEMES[theme]
    style: dict[Any, Any] = {
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": grid,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": grid,
        "axes.facecolor": ground,
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(12, 4.4), dpi=120, facecolor=ground, layout="constrained")
        for axes, axis in zip(figure.subplots(1, len(AXES)), AXES, strict=True):
            _draw_axis(axes, axis, result)
        lines = {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()}
        figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=len(LOOKS), frameon=False)
        figure.supxlabel(caption(result), fontsize=9)
        figure.savefig(path, metadata={"Title": ", ".join(lines), "Software": None})
    print(f"wrote {path}")


def caption(result: Mapping[str, Any]) -> str:
    """What was measured, where, and of which commit."""
    machine, settings = result["machine"], result["settings"]
    where = f"{machine['cores']} cores of an {machine['cpu']} ({', '.join(machine['flags'])})"
    return (
        f"Model {settings['model']}, {settings['dtype']}, {where}, commit {record.short(result['commit'])}. "
        f"Left: {settings['short']} tokens in and out of each request, more is better; others: one request, less is."
    )


def _draw_axis(axes: Axes, axis: Axis, result: Mapping[str, Any]) -> None:
    """The lines of one picture."""
    drawn = [row for row in result["results"] if row["curve"] == axis.curve and row[axis.y] is not None]
    for engine, (colour, mark) in LOOKS.items():
        line = sorted((row for row in drawn if row["engine"] == engine), key=lambda row: row[axis.x])
        if line:
            x, y = [row[axis.x] for row in line], [axis.scale * row[axis.y] for row in line]
            width = 2.4 if engine == "jaxpaged" else 1.6
            axes.plot(x, y, color=colour, marker=mark, markersize=5, linewidth=width, label=label(line[0]))
    axes.set_title(axis.title, fontsize=12, fontweight="bold")
    axes.set_xlabel(axis.x_label)
    axes.set_ylabel(axis.y_label)
    axes.set_xscale("log", base=2)
    axes.set_yscale(axis.y_scale)
    plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)
    if axis.y_scale == "log":
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.grid(True, linewidth=0.8)
