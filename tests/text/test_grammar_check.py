"""Hostile grammars: answered soon, in a child, within limits; what becomes of the child."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time

import pytest

from jaxpaged.core.request import GRAMMAR_STUCK
from jaxpaged.core.sampling_params import StructuredOutputs as S
from jaxpaged.errors import InvalidRequestError
from jaxpaged.text import grammar_check
from jaxpaged.text.grammar import GrammarCompiler
from tests.memory import resident
from tests.text.grammars import BYTE_LEVEL, EOS, HEAD, allowed, feed
from tests.text.hostile_grammars import HOSTILE, multiples

pytestmark = pytest.mark.usefixtures("frozen_heap")  # times are taken


class Heart:
    """A thread beside the work, and for how long the work kept it from running.

    In processor time of the process: other work on the machine does not count.
    """

    def __enter__(self) -> Heart:
        self.gap, self._stop = 0.0, False
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()
        return self

    def _beat(self) -> None:
        last = time.process_time()
        while not self._stop:
            time.sleep(0.002)
            now = time.process_time()
            self.gap, last = max(self.gap, now - last), now

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_input_is_answered_soon(compiler, case):
    compiler.prepare()
    start, wall = time.process_time(), time.monotonic()
    with Heart() as heart:
        try:
            grammar = compiler.compile(HOSTILE[case])
        except InvalidRequestError as error:
            assert len(str(error)) < 400
        else:
            rng = random.Random(0)
            for _ in range(40):
                if grammar.finished or grammar.error:
                    break
                grammar.accept(rng.choice(allowed(grammar)))
    # The child has a limit of its own. Processor time, as other work on the machine is no fault of ours.
    assert time.process_time() - start < 2 - grammar_check.CPU_SECONDS
    assert time.monotonic() - wall < 30
    assert heart.gap < 1.5  # of a processor that may be at half its speed
    assert feed(compiler.compile(S(regex="ab")), "ab")


def test_a_limit_within_a_text_is_an_error_of_that_text(compiler):
    grammar = compiler.compile(S(regex="((a{1,100}){1,100}){1,100}"))
    other = compiler.compile(S(regex="((a{1,100}){1,100}){1,100}"))
    a = BYTE_LEVEL.byte_ids("a")[0]
    for _ in range(200):
        if not grammar.accept(a):
            break
    assert grammar.error.startswith(GRAMMAR_STUCK)  # it is no fault of ours
    assert "too many" in grammar.error and "\n" not in grammar.error
    assert not grammar.accept(a) and not grammar.finished
    assert len(allowed(grammar)) >= HEAD  # a row that allows nothing would have no distribution
    assert allowed(other) == [i for i in range(HEAD) if i in (a,)]


def test_a_grammar_that_has_reached_a_limit_is_compiled_anew():
    """Its texts share what it has learned of its words: one of them must not spoil it for good."""
    compiler = GrammarCompiler(BYTE_LEVEL, HEAD, [EOS])
    wanted, a = S(regex="((a{1,100}){1,100}){1,100}"), BYTE_LEVEL.byte_ids("a")[0]
    lengths = []
    for _ in range(2):
        grammar = compiler.compile(wanted)
        lengths.append(next(n for n in range(200) if not grammar.accept(a)))
        assert compiler.find(wanted) is None
    assert lengths[0] == lengths[1] > 5
    assert len(compiler._cache) == 1 and compiler._cache.num_bytes < 2 * compiler._cache._entries.popitem()[1][1]
    compiler.close()


def test_the_child_comes_back_until_it_is_closed():
    compiler = GrammarCompiler(BYTE_LEVEL, HEAD, [EOS])
    compiler.compile(S(regex="x1"))
    child = compiler._vocabulary.checker._child
    assert child.poll() is None
    child.kill()  # by somebody: no fault of the next grammar's
    assert feed(compiler.compile(S(regex="x2")), "x2")
    with pytest.raises(InvalidRequestError, match="too much"):
        compiler.compile(S(json=multiples(101, 103, 107, 109)))
    assert feed(compiler.compile(S(regex="x3")), "x3")
    compiler.close()
    assert compiler._vocabulary.checker._child.poll() is not None
    assert feed(compiler.find(S(regex="x3")), "x3") and compiler.find(S(regex="x4")) is None
    with pytest.raises(RuntimeError, match="closed"):
        compiler.compile(S(regex="x4"))


def test_a_fault_on_the_deep_stack_is_told():
    with pytest.raises(grammar_check.Panic, match="oops"):
        grammar_check.on_deep_stack(lambda: exec("raise KeyboardInterrupt('oops')"))


@pytest.mark.parametrize("count", [400, pytest.param(5_000, marks=pytest.mark.slow)])
def test_memory_is_flat_over_many_schemas(count):
    compiler = GrammarCompiler(BYTE_LEVEL, HEAD, [EOS], cache_bytes=2 << 20)
    sizes = []
    for i in range(count):
        fields = {f"field {i} {j}": {"type": "string", "maxLength": i + j} for j in range(20)}
        allowed(compiler.compile(S(json={"type": "object", "properties": fields})))
        sizes.append(resident())
    assert 5 < len(compiler._cache) < 100
    assert compiler._cache.num_bytes <= 2 << 20
    assert sizes[-1] - sizes[count // 4] < 8
    compiler.close()


def test_an_interrupted_check_leaves_no_answer_for_the_next(compiler, monkeypatch):
    """The child's answer to what was interrupted must not be taken for that to another grammar."""
    read, interrupts = grammar_check._read, [KeyboardInterrupt()]

    def interrupted(pipe):
        if interrupts:
            raise interrupts.pop()
        return read(pipe)

    compiler.prepare()
    monkeypatch.setattr(grammar_check, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compiler.compile(S(regex="first[0-9]"))
    with pytest.raises(InvalidRequestError, match="regex"):
        compiler.compile(S(regex="((B"))
    compiler.compile(S(choice=["yes", "no"]))


def test_the_child_lives_within_what_this_process_may_have():
    """Under `ulimit -v` there is a hard limit, which nobody can raise."""
    code = (
        "import resource; from jaxpaged.text import grammar_check as g, grammar_source as s\n"
        "from jaxpaged.core.sampling_params import StructuredOutputs\n"
        "resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))\n"
        "checker = g.GrammarChecker([bytes([i]) for i in range(256)])\n"
        "print(repr(checker.check(s.llguidance_source(StructuredOutputs(regex='a+'))).error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "''", done.stderr


def test_what_keeps_the_child_from_starting_is_told(monkeypatch):
    monkeypatch.setattr(grammar_check.sys, "path", [])  # of which the child's is made
    monkeypatch.setattr(grammar_check, "__file__", "/no/such/file.py")
    with pytest.raises(RuntimeError, match=r"does not start.*No such file"):
        grammar_check.GrammarChecker([b"a"]).check("")


def test_a_verdict_that_somebody_else_caused_is_not_kept(compiler, monkeypatch):
    verdicts = [grammar_check.Verdict(grammar_check.TOO_HARD, 0, lasting=False)]
    check = grammar_check.GrammarChecker.check
    monkeypatch.setattr(
        grammar_check.GrammarChecker, "check", lambda self, source: verdicts.pop() if verdicts else check(self, source)
    )
    with pytest.raises(InvalidRequestError, match="too much time"):
        compiler.compile(S(regex="kept|not"))
    compiler.compile(S(regex="kept|not"))
