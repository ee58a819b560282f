"""Comparing engines: which jobs are run on whom, how often, and what is made of the answers."""

from typing import Any

from benchmarks import peers, record
from tests.benchmarks.fake_peer import FakePeer


def run(fakes: list[FakePeer], flags: str) -> list[dict[str, Any]]:
    return peers.compare(fakes, peers.arguments(flags.split()), "float32")


def test_every_job_is_run_on_every_engine_in_turns() -> None:
    """The first run of each, which takes longer, is not counted."""
    fakes = [
        FakePeer("jaxpaged", lambda work: 2.0),
        FakePeer("vllm", lambda work: 20.0 if work["seed"].endswith(", 0") else 4.0),
    ]
    rows = run(fakes, "--jobs 2x8+16 1x8+4 --repeat 2")
    assert [(row["engine"], row["job"]) for row in rows] == [
        ("jaxpaged", "2x8+16"),
        ("vllm", "2x8+16"),
        ("jaxpaged", "1x8+4"),
        ("vllm", "1x8+4"),
    ]
    assert (
        rows[1] | {"output_tokens_per_s": 8.0, "first_token_s": 1.0, "step_ms": 200.0, "seconds": [4.0] * 2} == rows[1]
    )
    assert rows[1]["same_tokens"] == 1.0 and rows[1]["dtype"] == "float32"
    seeds = [work["seed"] for work in fakes[0].asked]
    assert len(set(seeds)) == 6 and seeds == [work["seed"] for work in fakes[1].asked]


def test_a_long_run_is_not_repeated() -> None:
    fakes = [FakePeer("jaxpaged", lambda work: 9.0), FakePeer("vllm", lambda work: 11.0)]
    rows = run(fakes, "--jobs 1x8+4 --repeat 3 --once 10")
    assert [len(row["seconds"]) for row in rows] == [3, 1]


def test_what_is_left_out_is_not_run_and_shown_as_a_dash() -> None:
    fakes = [FakePeer("jaxpaged", lambda work: 2.0), FakePeer("vllm", lambda work: 4.0)]
    rows = run(fakes, "--jobs 2x8+16 1x4:4+4 --repeat 1 --leave-out vllm/*/1x4:4+4 jaxpaged/bfloat16/*")
    assert [work["seed"] for work in fakes[1].asked] == ["2x8+16, 0", "2x8+16, 1"]
    lines = cells(peers.wide_table(rows))
    assert lines["jaxpaged 0.1"] == ["16", "2", "3"] and lines["vllm 0.1"] == ["8", "-", "3"]
    assert lines["jaxpaged / vllm"] == ["**2.00 x**", "-", ""]


def test_an_engine_that_dies_is_left_out_from_there_on() -> None:
    fakes = [FakePeer("jaxpaged", lambda work: 2.0, dies_at="1x8+4"), FakePeer("vllm", lambda work: 4.0)]
    rows = run(fakes, "--jobs 2x8+16 1x8+4 8x8+4 --repeat 2")
    assert fakes[0].closed and not fakes[1].closed
    assert [row["engine"] for row in rows] == ["jaxpaged", "vllm", "vllm", "vllm"]


def test_the_table_compares_with_the_baseline_and_names_both_commits() -> None:
    fakes = [FakePeer("before", lambda work: 3.0), FakePeer("jaxpaged", lambda work: 2.0)]
    fakes[0].ready["versions"] = {"jaxpaged": "0c0b36b1c"}
    fakes[1].ready["versions"] = {"jaxpaged": "1234567ab+changes"}
    rows = run(fakes, "--jobs 2x8+16 --repeat 1")
    lines = cells(peers.wide_table(rows))
    assert list(lines) == ["output tok/s", "before 0c0b36b1c", "jaxpaged 1234567ab+changes", "jaxpaged / before"]
    assert lines["output tok/s"] == ["2 requests, 8 in, 16 out", "start to first token, s"]
    assert lines["jaxpaged / before"] == ["**1.50 x**", ""]


def test_a_record_becomes_a_table_a_dtype() -> None:
    rows = run([FakePeer("jaxpaged", lambda work: 2.0)], "--jobs 2x8+16 --repeat 1")
    rows.append(rows[0] | {"dtype": "bfloat16"})
    text = peers.tables(record.record("peers", rows, model="demo", repeat=1, once=60.0))
    assert text.count("| output tok/s") == 2 and "\n\nfloat32:\n\n|" in text and "\n\nbfloat16:\n\n|" in text


def test_agreement_counts_tokens_before_the_first_difference() -> None:
    assert peers.agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == 6 / 8
    assert peers.agreement([[1]], [[2]]) == 0.0


def cells(table: str) -> dict[str, list[str]]:
    """A Markdown table's lines by their first cell."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return {first: rest for first, *rest in [lines[0], *lines[2:]]}
