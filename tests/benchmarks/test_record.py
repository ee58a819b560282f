"""The records that benchmarks write."""

import json
import re
from pathlib import Path

from benchmarks import record


def test_a_record_says_what_where_and_with_which_versions(tmp_path: Path) -> None:
    written = record.record("offline", [{"output_tokens_per_s": 12.5}], model="demo")
    record.save(written, tmp_path / "results" / "offline.json")
    read = json.loads((tmp_path / "results" / "offline.json").read_text())
    assert read["results"] == [{"output_tokens_per_s": 12.5}]
    assert read["settings"] == {"model": "demo"}
    assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?|unknown", read["commit"])
    assert read["machine"]["cores"] >= 1 and read["machine"]["cpu"]
    assert read["versions"]["jax"].count(".") == 2


def test_versions_leave_out_what_is_not_installed() -> None:
    assert set(record.versions(("numpy", "no-such-distribution"))) == {"numpy"}


def test_a_table_is_markdown_with_aligned_columns() -> None:
    rows = [{"engine": "ours", "speed": 272.4}, {"engine": "theirs", "speed": 0.125, "hidden": 1}, {"engine": "none"}]
    lines = record.table(rows, {"engine": "engine", "speed": "tok/s"}).splitlines()
    assert lines[0] == "| engine | tok/s |"
    assert lines[1] == "|--------|-------|"
    assert lines[2] == "| ours   | 272   |"
    assert lines[3] == "| theirs | 0.125 |"
    assert lines[4] == "| none   |       |"
