"""Which engines are compared, and that a baseline is the other checkout's code."""

import argparse
from pathlib import Path

import pytest

from benchmarks import peer_group
from benchmarks.jobs import Job
from tests.benchmarks.fake_peer import FakePeer

# Stands in for another commit's package: its outputs are the prompt's length, again and again.
OTHER_JAXPAGED = """
import time
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, max_tokens, **options):
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, **options):
        self.engine = SimpleNamespace(num_programs=sorted(options))

    def generate(self, prompts, params, use_tqdm):
        metrics = SimpleNamespace(first_token_time=time.monotonic())
        return [SimpleNamespace(token_ids=[len(p)] * params.max_tokens, metrics=metrics) for p in prompts]
"""


def options(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    peer_group.add_options(parser)
    return parser.parse_args(flags)


def test_engines_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lib" / "python3.11" / "site-packages" / "vllm").mkdir(parents=True)
    assert peer_group.available(options("--peers-env", str(tmp_path))) == ["jaxpaged", "vllm"]
    told = capsys.readouterr().out
    assert "transformers: left out" in told and "llama.cpp: left out" in told and "before" not in told
    assert peer_group.available(options("--baseline", str(tmp_path))) == ["before", "jaxpaged"]


def test_the_baseline_is_the_other_checkouts_package(tmp_path: Path) -> None:
    (tmp_path / "before" / "jaxpaged").mkdir(parents=True)
    (tmp_path / "before" / "jaxpaged" / "__init__.py").write_text(OTHER_JAXPAGED)
    files = peer_group.ModelFiles(tmp_path, None, kv_values=10, scratch=tmp_path)
    args, job = options("--baseline", str(tmp_path / "before")), Job.parse("2x3:4+5")
    with peer_group.started(["before"], args, files, "float32", [job]) as peers:
        ((peer, reply),) = peer_group.in_turns(peers, job.work(0), timeout=60)
        assert reply["token_ids"] == [[7] * 5] * 2
        assert 0 < reply["first_token_s"] <= reply["seconds"]
        assert "kv_cache_bytes" in peer.ready["notes"] and "enable_prefix_caching" not in peer.ready["notes"]
        assert peer.ready["versions"]["jaxpaged"] == "unknown"  # no git there
    assert peer.closed


def test_a_checkout_without_the_package_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = peer_group.ModelFiles(tmp_path, None, kv_values=10, scratch=tmp_path)
    args = options("--baseline", str(tmp_path))
    with peer_group.started(["before"], args, files, "float32", [Job.parse("1x1+1")]) as peers:
        assert not peers
    assert "before, float32: left out" in capsys.readouterr().out


def test_a_row_has_medians_and_the_time_of_a_step() -> None:
    runs = [{"seconds": s, "first_token_s": 1.0} for s in (3.0, 9.0, 5.0)]
    row = peer_group.row(FakePeer("vllm", lambda work: 0.0), Job.parse("2x3+5"), runs)
    assert (row["output_tokens_per_s"], row["first_token_s"], row["step_ms"]) == (2.0, 1.0, 1000.0)
    assert peer_group.label(row) == "vllm 0.1"
    single = peer_group.row(FakePeer("vllm", lambda work: 0.0), Job.parse("2x3+1"), runs)
    assert single["step_ms"] is None
