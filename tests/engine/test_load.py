"""An engine whose weights are read while its programs are compiled."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.device.program_store import ProgramStore
from jaxpaged.engine.load import build_engine
from tests.engine.tiny import VOCAB, run

PROMPT = [5, 17, 99, 4]


@pytest.fixture
def options(tiny_config) -> EngineConfig:
    """Of few and small programs."""
    few: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_decode_steps": 1, "swap_space": 0.0}
    return dataclasses.replace(tiny_config, logits_processors=(), compilation_cache_dir=None, **few)


def test_weights_come_while_programs_are_compiled(tiny_module, tiny_params, options, make_engine, monkeypatch):
    """They are read in the caller's thread, with warm-up under way; and the tokens are those of any other engine."""
    compiling, program = threading.Event(), ProgramStore.program

    def announced(*args: Any) -> Any:
        compiling.set()
        return program(*args)

    monkeypatch.setattr(ProgramStore, "program", announced)

    def read() -> dict:
        assert compiling.wait(60), "nobody compiles meanwhile"
        return tiny_params

    engine = build_engine(tiny_module, read, options, vocab_size=VOCAB)
    assert engine.runner.params is tiny_params
    tokens = [run(e, [PROMPT])[0].token_ids for e in (engine, make_engine())]
    assert tokens[0] == tokens[1] and engine.num_compilations == 0


def test_what_reading_raises_is_raised_at_once(tiny_module, options, monkeypatch):
    """Programs that are not compiled yet are dropped."""
    read_failed = threading.Event()
    names: list[str] = []

    def slow(_: Any, name: str, *__: Any) -> None:
        names.append(name)
        assert read_failed.wait(60)

    monkeypatch.setattr(ProgramStore, "program", slow)

    def read() -> dict:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        build_engine(tiny_module, read, options, vocab_size=VOCAB)
    read_failed.set()
    assert len(names) <= 2, "those that were being compiled"


def test_what_compiling_raises_is_raised(tiny_module, tiny_params, options, monkeypatch):
    def fails(*_: Any) -> None:
        raise MemoryError("no room for a program")

    monkeypatch.setattr(ProgramStore, "program", fails)
    with pytest.raises(MemoryError, match="no room"):
        build_engine(tiny_module, lambda: tiny_params, options, vocab_size=VOCAB)
