"""Ctrl-C never comes between a step's arrays."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from jaxpaged.engine.interrupts import interrupts_held
from tests.engine.tiny import GREEDY, prompt, run


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    """Interrupts as a terminal's programs know them: what is started in the background may have to ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_comes_when_the_block_is_done():
    seen = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("went on")
    assert seen == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_comes_through():
    seen = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("went on")
    assert not seen
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_are_left_alone():
    changed = []

    def work():
        with interrupts_held():
            changed.append(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert changed == [False]


def test_an_engine_goes_on_after_an_interrupt_inside_a_device_call(make_engine, solo, monkeypatch):
    """The signal arrives while a program runs that has taken the pool: its result must still be stored."""
    engine = make_engine()
    forward = engine.runner._forward

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return forward(*arguments)

    engine.add_request(engine.make_request("a", prompt(20), GREEDY))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not engine.has_work and not engine.scheduler.block_manager.num_used_blocks
    assert run(engine, [prompt(20)])[0].token_ids == solo(prompt(20)).token_ids
