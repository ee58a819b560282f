"""What the README shows of the records."""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import peers, readme, record
from tests.benchmarks.fake_peer import FakePeer


def test_the_section_has_the_comparison_and_pictures_for_both_grounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(record.RESULTS, tmp_path, dirs_exist_ok=True)
    args = peers.arguments(["--jobs", "2x8+16", "--repeat", "1"])
    rows = peers.compare([FakePeer("jaxpaged", lambda work: 2.0)], args, "float32")
    (tmp_path / "peers.json").write_text(json.dumps(record.record("peers", rows, model="demo", repeat=1, once=60.0)))
    (tmp_path / "scaling.json").touch()
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    text = readme.section()
    assert "2 requests, 8 in, 16 out" in text
    pictures = re.findall(r"benchmarks/results/scaling-(\w+)\.png", text)
    assert pictures == ["dark", "light"]
