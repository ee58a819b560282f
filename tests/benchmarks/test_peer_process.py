"""The protocol with an engine's process."""

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import peer_process

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
    assert peer.closed
    with pytest.raises(ProcessLookupError):
        os.kill(peer.ready["pid"], 0)


def test_an_engine_that_dies_is_reported_with_its_last_words(peer: peer_process.Peer) -> None:
    with pytest.raises(peer_process.PeerFailedError, match=r"status 7.*out of luck"):
        peer.run({"die": True}, timeout=60)


def test_an_engine_that_takes_too_long_is_reported(peer: peer_process.Peer) -> None:
    with pytest.raises(peer_process.PeerFailedError, match="no answer in 0 s"):
        peer.run({"num_prompts": 1, "sleep": 30}, timeout=0.2)
