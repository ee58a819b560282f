"""Compiling grammars that strangers write: tried out first in a process that may die.

llguidance limits the work of a step, but some inputs of a few hundred bytes still take it minutes to compile, and deep
ones end the whole process in a stack overflow. No list of bad inputs is complete. So each new grammar is compiled in a
child first, under a limit of processor time and of memory; only what came through is compiled here. The child also
tells how much memory a compiled grammar keeps.

Run as a script this file is the child, so it imports nothing of jaxpaged.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import IO, Any, TypeVar, cast

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

CPU_SECONDS = 0.6  # for one grammar; it is compiled twice, and a dead child takes 0.3 to replace
MEMORY_BYTES = 768 << 20  # beyond what the child has when it is ready
STACK_BYTES = 256 << 20  # where grammars are compiled: address space, touched only as far as a grammar is deep
TOO_HARD = "it takes too much time, memory or depth to compile"

_WALL_SECONDS = 30.0  # a child that says nothing for so long is stuck, however slow the machine
_SECONDS_TO_END = 5.0
_PR_SET_PDEATHSIG = 1
# What Python and its libraries need of the environment.
_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME")
_NO_TEXT = "it matches no text"
# How a child ends that a grammar killed: out of time, out of stack, out of memory.
_DEATHS = (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)
Result = TypeVar("Result")


class Verdict(msgspec.Struct, array_like=True):
    """What the child found: `error` is "" for a good grammar; `size` is the bytes that it keeps in memory.

    Attributes:
      lasting: whether it would be the same another time; not if somebody else killed the child.
    """

    error: str
    size: int
    lasting: bool = True


class Panic(Exception):
    """A fault in llguidance."""


class _Wrapper:
    """A vocabulary as `LLTokenizer` reads it. Its last token is the end of the text, known to the grammar alone."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes]):
        self.tokens = [*tokens, b"<end>"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [len(tokens)]

    def __call__(self, text: str) -> list[int]:
        """Asked for only if grammars were to force tokens, which they are told not to."""
        raise NotImplementedError("grammars must not depend on how a text is cut into tokens")


def build_tokenizer(tokens: Sequence[bytes]) -> LLTokenizer:
    """The tokens of a vocabulary by id; those without bytes are never produced. Id `len(tokens)` is the end."""
    wrapper = cast(TokenizerWrapper, _Wrapper(tokens))
    plain = LLTokenizer(wrapper, eos_token=len(tokens), slices=[])
    # In two parts: each holds the GIL, for a quarter of a second with 128,000 tokens. Slices are sets of tokens whose
    # masks are known beforehand; they make long strings ten times as fast.
    return plain.with_slices(LLTokenizer.general_slices())


def build_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compiles a grammar; its `get_error` says what is wrong with it."""
    return LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)


def on_deep_stack(function: Callable[[], Result]) -> Result:
    """Runs something on a thread with STACK_BYTES of stack. Raises Panic if it fails there."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # a panic of Rust is no Exception
            errors.append(error)

    with _STACK_LOCK:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise Panic(str(errors[0])) from errors[0]
    return results[0]


_STACK_LOCK = threading.Lock()  # the size of stacks is the process's
_LIMITS = LLParserLimits(
    max_items_in_row=10_000,  # an object of N optional properties has 4 N
    step_lexer_fuel=200_000,  # about 15 ms
    step_max_items=50_000,
    max_lexer_states=30_000,  # about 1.5 KB each, for each text under way
    max_grammar_size=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)


class GrammarChecker:
    """The child, started when it is first needed and again when it died. One grammar at a time, from one thread.

    Only `close` may be called from another thread. It is for good: what is being checked raises RuntimeError.
    """

    def __init__(self, tokens: Sequence[bytes]):
        self._vocabulary = msgspec.msgpack.encode(list(tokens))
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], Any] = lambda: None
        self._closed = False

    def check(self, source: str) -> Verdict:
        """Compiles a grammar in the child."""
        for _ in range(2):
            child = self.start()
            try:
                verdict = self._ask(child, source)
            except BaseException:  # an interrupt: its answer, still to come, must not be taken for that to the next
                self._bury()
                raise
            if verdict is not None:
                return verdict
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)
            self._bury()
            if child.returncode in _DEATHS:
                return Verdict(TOO_HARD, 0)
        return Verdict(TOO_HARD, 0, lasting=False)  # killed by others, twice

    def _ask(self, child: subprocess.Popen[bytes], source: str) -> Verdict | None:
        """What the child says; None if it dies."""
        try:
            return msgspec.msgpack.decode(_exchange(child, source.encode()), type=Verdict)
        except (OSError, EOFError):
            return None

    def close(self) -> None:
        """Ends the child, if there is one, and starts no other."""
        self._closed = True
        child = self._child
        if child is not None:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_SECONDS_TO_END)

    def _bury(self) -> None:
        self._end()
        self._child = None

    def start(self) -> subprocess.Popen[bytes]:
        """The child, ready."""
        if self._closed:
            raise RuntimeError("the checker of grammars is closed")
        if self._child is not None:
            return self._child
        env = {
            # Nothing of this process's secrets: whoever breaks a compiler of grammars shall find none.
            **{name: value for name, value in os.environ.items() if name in _VARIABLES},
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "MALLOC_ARENA_MAX": "1",  # then what malloc says of itself is all there is
        }
        command = [sys.executable, "-P", __file__]  # -P: the modules beside this file hide no others
        with tempfile.TemporaryFile() as complaints:
            child = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints)
            self._child, self._end = child, weakref.finalize(self, _end, child)
            try:
                if self._closed:  # meanwhile
                    raise RuntimeError("the checker of grammars is closed")
                _exchange(child, self._vocabulary)  # it is ready
            except (OSError, EOFError) as error:
                self._bury()
                complaints.seek(0)
                why = complaints.read().decode(errors="replace").strip().splitlines()[-1:]
                raise RuntimeError(f"the process that tries out grammars does not start: {command} {why}") from error
            except BaseException:
                self._bury()
                raise
        return child


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # it may hold what the child did not read
                pipe.close()


def _exchange(child: subprocess.Popen[bytes], message: bytes) -> bytes:
    """The child's answer. Raises EOFError or OSError if it dies, or is silent for so long that it is killed."""
    assert child.stdin is not None
    watchdog = threading.Timer(_WALL_SECONDS, child.kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        _write(child.stdin, message)
        return _read(child.stdout)
    finally:
        watchdog.cancel()


def _write(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(4, "little") + message)
    pipe.flush()


def _read(pipe: IO[bytes] | None) -> bytes:
    """Raises EOFError if the other side is gone."""
    assert pipe is not None
    header = pipe.read(4)
    message = pipe.read(int.from_bytes(header, "little"))
    if len(header) < 4 or len(message) < int.from_bytes(header, "little"):
        raise EOFError
    return message


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """The child: reads a vocabulary, then grammars."""
    tokenizer = build_tokenizer(msgspec.msgpack.decode(_read(requests), type=list[bytes]))
    _limit_memory(_memory() + STACK_BYTES + MEMORY_BYTES)
    _write(answers, b"")
    while True:
        source = _read(requests).decode()
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process
        verdict = _try_out(tokenizer, source)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, msgspec.msgpack.encode(verdict))


def _limit_memory(num_bytes: int) -> None:
    """Limits the address space, within what this process may have at all."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _try_out(tokenizer: LLTokenizer, source: str) -> Verdict:
    """Compiles on a deep stack, then does on this small one what will be done with the grammar later."""
    before = _allocated()
    matcher = on_deep_stack(lambda: build_matcher(tokenizer, source))
    if matcher.is_error():
        return Verdict(matcher.get_error(), 0)
    copy = matcher.deep_copy()
    copy.compute_bitmask()
    if copy.is_error():
        error = copy.get_error()
        return Verdict(_NO_TEXT if error.startswith("NoExtension") else error, 0)
    del copy
    return Verdict("", max(0, _allocated() - before))


_MALL_INFO = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALL_INFO]


def _allocated() -> int:
    """Bytes that malloc has given out; 0 where the C library does not tell."""
    try:
        info = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    info.restype = _MallInfo
    told = info()
    return told.uordblks + told.hblkhd


def _memory() -> int:
    """Bytes of address space in use."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 40  # unknown: then no limit in effect


if __name__ == "__main__":
    with contextlib.suppress(AttributeError):  # Linux only: even if it is stopped it ends with its parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes our input
    with contextlib.suppress(EOFError):
        _serve(sys.stdin.buffer, sys.stdout.buffer)
