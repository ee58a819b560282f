"""Writes the README's benchmark tables from the JSON in benchmarks/results: `python -m benchmarks.readme`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from benchmarks import http_parts, http_path, http_peers, peers, record
from benchmarks.host_overhead import COLUMNS as HOST_COLUMNS
from benchmarks.long_prompt import COLUMNS as PROMPT_COLUMNS
from benchmarks.memory import COLUMNS as MEMORY_COLUMNS
from benchmarks.padding import COLUMNS as PADDING_COLUMNS
from benchmarks.sampling import COLUMNS as SAMPLING_COLUMNS
from benchmarks.startup import COLUMNS as STARTUP_COLUMNS

BEGIN, END = "<!-- benchmark table -->", "<!-- end of benchmark table -->"


def section() -> str:
    """The text between the README's markers."""
    host, startup, sampling = _read("host_overhead"), _read("startup"), _read("sampling")
    padding, prompts, memory = _read("padding"), _read("long_prompt"), _read("memory")
    return "\n\n".join(
        [
            peers.tables(_read("peers")),
            *([_scaling()] if (record.RESULTS / "scaling.json").exists() else []),
            _http_peers(),
            _http_path(),
            "Host time a step; and how long a device whose steps take 5 ms has nothing to do "
            "(`python -m benchmarks.host_overhead`):",
            record.table(host["results"], HOST_COLUMNS),
            f"A decode step of {sampling['settings']['model']} with random float32 weights, by how tokens are chosen "
            "(top_p 0.9 at temperature 0.8; `python -m benchmarks.sampling`):",
            record.table(sampling["results"], SAMPLING_COLUMNS),
            "Starts of the demo model, as in `make demo` and of the server with default settings "
            "(`python -m benchmarks.startup`):",
            record.table(startup["results"], STARTUP_COLUMNS),
            "A long prompt beside 64 running requests: what it costs the engine's loop, and its longest round "
            "(`python -m benchmarks.long_prompt`):",
            record.table(prompts["results"], PROMPT_COLUMNS),
            "Memory of loading, of the KV pool, of a step and of an import, beside what each should take "
            "(`python -m benchmarks.memory`):",
            record.table(memory["results"], MEMORY_COLUMNS),
            "Padding in what steps compute, simulated (`python -m benchmarks.padding`):",
            record.table(padding["results"], PADDING_COLUMNS),
        ]
    )


def _scaling() -> str:
    """The pictures, one for each ground."""
    alt = (
        "Throughput against requests at once, time to first token and time of a step against tokens, each engine a line"
    )
    return (
        "How that changes with load and length (`python -m benchmarks.scaling`):\n\n<picture>\n"
        '  <source media="(prefers-color-scheme: dark)" srcset="benchmarks/results/scaling-dark.png">\n'
        f'  <img src="benchmarks/results/scaling-light.png" alt="{alt}">\n</picture>'
    )


def _http_peers() -> str:
    """Streaming beside vLLM."""
    streams = _read("http_peers")
    machine, settings = streams["machine"], streams["settings"]
    shape = f"{settings['input_len']} tokens in, {settings['output_len']} out, {settings['dtype']}"
    where = f"{machine['cores']} cores of an {machine['cpu']} ({', '.join(machine['flags'])})"
    return (
        f"Streaming over HTTP, a random Llama of one layer and 49,152 words, {shape}, servers in turns on {where}, "
        f"medians of {settings['repeat']}; clients: ours (lean) and `vllm bench serve` "
        "(`python -m benchmarks.http_peers`):\n\n" + http_peers.wide_table(streams["results"])
    )


def _http_path() -> str:
    """What the way to the client costs."""
    path = _read("http_path")
    return (
        "The way from the engine to the client, with a scripted engine: real processes and sockets, client on the same "
        "cores (`python -m benchmarks.http_path`):\n\n"
        + record.table(path["results"], http_path.COLUMNS)
        + "\n\nOf the CPU time of a token, timed alone:\n\n"
        + record.table(path["settings"]["parts"], http_parts.COLUMNS)
    )


def _read(name: str) -> Mapping[str, Any]:
    return json.loads((record.RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def main() -> None:
    readme = record.ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    assert BEGIN in text and END in text, "README.md has lost its markers"
    new = re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{section()}\n{END}", text, flags=re.DOTALL)
    readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
