"""What takes long is done beside the event loop: others are answered meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from server.routes import embeddings, metrics
from tests.fake_engine import HIDDEN_SIZE
from tests.server.conftest import LiveServer


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Iterator[threading.Event]:
    """A function of a module that waits until this ends; the event is set once it has been called."""
    called, go_on, work = threading.Event(), threading.Event(), getattr(module, name)

    def waiting(*args: Any) -> Any:
        called.set()
        assert go_on.wait(60)
        return work(*args)

    monkeypatch.setattr(module, name, waiting)
    try:
        yield called
    finally:
        go_on.set()


def ask_for_metrics(server: LiveServer) -> Any:
    return server.http.get("/metrics")


def ask_for_embeddings(server: LiveServer) -> Any:
    return server.post("/v1/embeddings", input=[[5]] * (embeddings.LONG // HIDDEN_SIZE + 1))


@pytest.mark.parametrize(
    ("module", "name", "ask"),
    [(metrics, "generate_latest", ask_for_metrics), (embeddings, "_encoded", ask_for_embeddings)],
)
def test_others_are_answered_meanwhile(
    live: LiveServer, monkeypatch, module: Any, name: str, ask: Callable[[LiveServer], Any]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with held(monkeypatch, module, name) as called:
            long = pool.submit(ask, live)
            assert called.wait(60)
            assert live.http.get("/health", timeout=20).status_code == 200
            assert not long.done()
        assert long.result(60).status_code == 200
