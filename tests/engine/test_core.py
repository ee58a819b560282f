"""The engine core by itself: messages in, messages out."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputs
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.messages import Abort, AddRequest, Answer, Call, Refused, Updates
from jaxpaged.text.grammar import GrammarCompiler
from tests.fake_engine import FakeEngine
from tests.scripted_core import EOS, TOKENIZER
from tests.waiting import wait_for

GRAMMAR = SamplingParams(structured_outputs=StructuredOutputs(regex="abc"))


class GatedGrammars:
    """Knows no grammar, and compiles when it is let."""

    def __init__(self):
        self.begun, self.go = threading.Event(), threading.Event()
        self.real = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, [EOS])

    def find(self, wanted: StructuredOutputs, **_: Any) -> None:
        return None

    def compile(self, wanted: StructuredOutputs, **options: Any) -> Any:
        self.begun.set()
        assert self.go.wait(20)
        return self.real.compile(wanted, **options)

    def close(self) -> None:
        self.go.set()
        self.real.close()


class Running:
    """A core whose loop runs, and what it sends."""

    def __init__(self, engine: FakeEngine, grammars: Any):
        self.engine, self.sent = engine, queue.SimpleQueue()
        self.core = EngineCore(engine, grammars, self.sent.put)
        self.errors: list[BaseException] = []
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.core.run()
        except BaseException as error:
            self.errors.append(error)

    def next(self) -> Any:
        """The next message, but for those that tell the stats only."""
        while True:
            message = self.sent.get(timeout=10)
            if not isinstance(message, Updates) or message.updates:
                return message

    def add(
        self, request_id: str = "id", params: SamplingParams | None = None, prompt: tuple[int, ...] = (97,)
    ) -> None:
        self.core.receive(AddRequest(request_id, list(prompt), params or SamplingParams(max_tokens=3), 0.0))

    def called(self) -> Answer:
        """A call's answer: what was sent before it has been handled."""
        self.core.receive(Call(0, "snapshot"))
        while not isinstance(message := self.sent.get(timeout=10), Answer):
            pass
        return message


@pytest.fixture
def running() -> Iterator[Running]:
    engine = FakeEngine(TOKENIZER.byte_ids("abc"), vocab_size=TOKENIZER.vocab_size, eos_token_ids=[EOS], num_blocks=4)
    running = Running(engine, GatedGrammars())
    yield running
    running.core.stop()
    running.thread.join(10)
    assert not running.thread.is_alive()


def test_each_step_is_one_message(running) -> None:
    running.add()
    tokens = [running.next().updates[0].new_token_ids for _ in range(3)]
    assert [t for step in tokens for t in step] == TOKENIZER.byte_ids("abc")
    assert running.sent.qsize() <= 1


def test_stats_come_when_nothing_steps(running) -> None:
    running.engine.script = [5]
    running.engine.delay = 0.01
    running.add(params=SamplingParams(max_tokens=400))
    running.next()
    running.core.receive(Abort("id"))
    while (message := running.sent.get(timeout=10)).stats.num_running:
        pass
    assert message.updates == [] and message.stats.num_used_blocks == 0
    with pytest.raises(queue.Empty):
        running.sent.get(timeout=0.05)


def test_idle_time_is_used_until_nothing_is_left_to_do(running, monkeypatch) -> None:
    """Not while a request runs, nor right after it: most idle times are a client's way to its next request."""
    engine = running.engine
    engine.idle_work, engine.script, engine.delay = 3, [5], 0.001
    running.add(params=SamplingParams(max_tokens=400))
    monkeypatch.setattr("jaxpaged.engine.core.IDLE_SECONDS", 0.05)
    while not running.next().updates[-1].finish_reason:
        pass
    wait_for(lambda: len(engine.idle_times) == 3)
    assert engine.idle_times[0] - engine.last_step >= 0.05
    running.add()
    assert running.next().updates
    running.called()
    time.sleep(0.2)
    assert len(engine.idle_times) == 3 and not running.errors


def test_whoever_asks_for_news_takes_no_idle_time(running, monkeypatch) -> None:
    """A watchdog or a page may ask several times a second."""
    running.engine.idle_work = 2
    monkeypatch.setattr("jaxpaged.engine.core.IDLE_SECONDS", 0.05)
    running.add()
    running.next()
    for _ in range(100):
        running.called()
        time.sleep(0.01)
        if len(running.engine.idle_times) == 2:
            return
    raise AssertionError("no time was left")


def test_what_is_refused_says_why_and_disturbs_nobody(running) -> None:
    running.add("empty", prompt=())
    running.add("outside", prompt=(10**6,))
    running.add("large", prompt=(5,) * 70)  # known to be by the queue only
    refused = [running.next() for _ in range(3)]
    running.engine.queue_limit = 0
    running.add("full")
    refused.append(running.next())
    assert all(isinstance(message, Refused) for message in refused)
    assert [(m.request_id, m.failure.kind) for m in refused] == [
        ("empty", "InvalidRequestError"), ("outside", "InvalidRequestError"), ("large", "RequestTooLargeError"),
        ("full", "QueueFullError"),
    ]  # fmt: skip
    running.engine.queue_limit = None
    running.add("fine")
    assert isinstance(running.next(), Updates)


def test_a_fault_in_one_request_is_logged_and_told(running, caplog) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("a bug")

    running.engine.make_request = broken
    running.add()
    message = running.next()
    assert message.failure.kind == "" and "a bug" in message.failure.message and "a bug" in caplog.text


def test_others_do_not_wait_for_a_grammar(running) -> None:
    running.add("slow", GRAMMAR)
    running.add("fast")
    assert running.core._grammars.begun.wait(10)
    assert {running.next().updates[0].request_id for _ in range(3)} == {"fast"}
    running.core._grammars.go.set()
    assert running.next().updates[0].request_id == "slow"


def test_an_abort_overtakes_no_grammar(running) -> None:
    running.add("gone", GRAMMAR)
    assert running.core._grammars.begun.wait(10)
    running.core.receive(Abort("gone"))
    running.core._grammars.go.set()
    running.add("next", GRAMMAR)
    assert running.next().updates[0].request_id == "next" and running.engine.added == ["next"]
    assert not running.core._compiling


def test_a_wrong_grammar_is_refused_late(running) -> None:
    running.core._grammars.go.set()
    running.add(params=SamplingParams(structured_outputs=StructuredOutputs(regex="(")))
    message = running.next()
    assert isinstance(message, Refused) and message.failure.param == "structured_outputs"
    assert not running.core._compiling


def test_calls_are_answered_between_steps(running) -> None:
    assert running.called().result.num_blocks == 4
    for method, kind in (("abort", "UnsupportedError"), ("__class__", "UnsupportedError"), ("stop_profile", "Invalid")):
        running.core.receive(Call(7, method))
        answer = running.next()
        assert answer.call_id == 7 and answer.result is None and answer.failure.kind.startswith(kind)


def test_a_failing_engine_ends_the_loop(running) -> None:
    running.engine.fail_with = RuntimeError("device lost")
    running.add()
    running.thread.join(10)
    assert running.errors == [running.engine.fail_with]


def test_stopping_waits_for_no_grammar(running) -> None:
    running.add(params=GRAMMAR)
    assert running.core._grammars.begun.wait(10)
    running.core.stop()
    running.thread.join(5)
    assert not running.thread.is_alive() and not running.engine.added
