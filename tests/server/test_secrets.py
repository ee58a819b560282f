"""Keys are in the memory of the front alone: not in the environment of any process that it starts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jaxpaged.engine.core_child import API_KEY_VARIABLES
from tests.engine.test_process_client import is_alive
from tests.server.test_processes import Served
from tests.waiting import wait_for

KEY = "key-of-the-front"
TOKEN = "token-of-the-hub"


@pytest.mark.parametrize("variable", API_KEY_VARIABLES)
def test_children_have_no_secrets_and_a_stopped_one_ends_too(monkeypatch, variable) -> None:
    for other in API_KEY_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, KEY)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    served = Served("echo", 1)
    try:
        wait_for(served.is_ready, 300)
        served.http.headers["Authorization"] = f"Bearer {KEY}"
        wanted = {"structured_outputs": {"regex": "abc"}}
        assert served.complete("abc", **wanted).json()["choices"][0]["text"] == "abc"
        children = served.processes()
        grammars = [pid for pid, command in children.items() if "grammar_check" in command]
        assert len(grammars) >= 2 and len(served.cores()) == 1
        for pid in children:
            environment = Path(f"/proc/{pid}/environ").read_text()
            assert KEY not in environment, children[pid]
            assert TOKEN not in environment or pid not in grammars  # a core may have to load a model with it
        for pid in grammars:
            os.kill(pid, signal.SIGSTOP)
        served.child.send_signal(signal.SIGTERM)
        assert served.child.wait(60) == 0
        wait_for(lambda: not any(is_alive(pid) for pid in children))
    finally:
        served.stop()
