"""An engine whose weights are read while its programs are compiled, and which serves before all of them are."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.device import warm_up
from jaxpaged.device.buckets import Bucket
from jaxpaged.device.program_store import ProgramStore
from jaxpaged.device.runner import Runner
from jaxpaged.engine.load import build_engine
from tests.engine.conftest import BUCKETS
from tests.engine.tiny import VOCAB, prompt, run

PROMPT = [5, 17, 99, 4]


@pytest.fixture
def options(tiny_config) -> EngineConfig:
    """Of few and small programs."""
    few: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_decode_steps": 1, "swap_space": 0.0}
    return dataclasses.replace(tiny_config, logits_processors=(), **few)


def test_weights_come_and_requests_are_served_while_programs_are_compiled(
    tiny_module, tiny_params, options, make_engine, monkeypatch
):
    """The warm-up's thread stands before its first program until one request is answered: with the same tokens."""
    compiling, reached, answered = threading.Event(), threading.Event(), threading.Event()
    needed, caller = Runner.bucket_programs, threading.current_thread()

    def gate() -> None:
        reached.set()
        assert answered.wait(60), "the request waits for programs"

    def gated(self: Runner, buckets: Sequence[Bucket]) -> list[Any]:
        first = compiling.set if threading.current_thread() is caller else gate
        return [first, *needed(self, buckets)]

    def read() -> dict:
        assert compiling.wait(60), "nobody compiles meanwhile"
        return tiny_params

    monkeypatch.setattr(Runner, "bucket_programs", gated)
    monkeypatch.setattr(warm_up, "_PAUSE", 0)
    engine = build_engine(tiny_module, read, options, vocab_size=VOCAB, gradually=True)
    assert engine.runner.params is tiny_params and reached.wait(60)
    answers = [run(engine, [PROMPT])]
    assert engine.cold_programs["decoding, by requests"] == [1]
    answered.set()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "jaxpaged-warm-up")
    thread.join(60)
    answers.append(run(engine, [PROMPT]))
    assert not any(engine.cold_programs.values()) and engine.num_compilations == 0
    assert [a.token_ids for (a,) in answers] == [run(make_engine(), [PROMPT])[0].token_ids] * 2


@pytest.mark.parametrize("max_steps", [1, 4])
@pytest.mark.parametrize("ready", [[BUCKETS.first], BUCKETS.mixed[-1:], BUCKETS.mixed + BUCKETS.decode[-1:]])
def test_steps_of_buckets_that_are_not_ready_are_right(make_engine, runner, monkeypatch, ready, max_steps):
    """They take others, for which prompts are cut, with the same tokens; a step of several without its loop is one."""
    prompts = [prompt(n) for n in (3, 9, 30, 5)]
    expected = run(make_engine(), prompts)
    unready = tuple(bucket for bucket in BUCKETS.all if bucket not in ready)
    monkeypatch.setattr(runner, "_warm_up", SimpleNamespace(unready=unready, unused=set()))
    assert run(make_engine(max_steps=max_steps), prompts) == expected


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
