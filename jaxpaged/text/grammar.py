"""Structured outputs: a JSON schema, a regular expression, choices or a grammar becomes what may come next.

The parser is llguidance's. It sees the bytes of the tokens only: any way of cutting a valid text into tokens is
allowed, and the model chooses as it would without a grammar. Special tokens are no text and never come; a model's EOS
tokens come where the text may end.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from jaxpaged.core.request import GRAMMAR_STUCK
from jaxpaged.core.sampling_params import StructuredOutputs
from jaxpaged.errors import UnavailableError, UnsupportedError
from jaxpaged.text.grammar_check import GrammarChecker, Panic, build_matcher, build_tokenizer, on_deep_stack
from jaxpaged.text.grammar_source import invalid, llguidance_source, reason
from jaxpaged.text.tokenizer import Tokenizer

CACHE_BYTES = 256 << 20


class GrammarCompiler:
    """Compiles structured outputs for one tokenizer, and keeps what it compiled. Safe to use from many threads.

    Args:
      tokenizer: whose tokens the model produces.
      vocab_size: rows of the model's head, maybe more than the tokenizer has tokens.
      eos_token_ids: ids that end a text.
      cache_bytes: memory for compiled grammars; the least recently used go first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        *,
        cache_bytes: int = CACHE_BYTES,
    ):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._cache = GrammarCache(cache_bytes)
        self._lock = threading.Lock()  # one compilation at a time
        self._vocabulary: _Vocabulary | None = None
        self._closed = False

    def compile(self, wanted: StructuredOutputs, *, ignore_eos: bool = False) -> LLGuidanceGrammar:
        """A grammar at its start, for one sample.

        Args:
          ignore_eos: no EOS comes; the text goes on while the grammar can, and ends where it cannot.

        Raises:
          InvalidRequestError: it is not valid, not supported, too large or too hard, or matches no text.
          UnavailableError: it cannot be tried out now, for want of a process, a thread or a file.
        """
        source = llguidance_source(wanted)
        key = _digest(source)
        grammar = self._begin(wanted, self._cache.get(key), ignore_eos)
        if grammar is not None:
            return grammar
        with self._lock:
            grammar = self._begin(wanted, self._cache.get(key), ignore_eos)
            if grammar is None:
                found, size = self._compile(source)
                if size is not None:
                    self._cache.put(key, found, size)
                grammar = self._begin(wanted, found, ignore_eos)
                assert grammar is not None, "it was good a moment ago"
        return grammar

    def find(self, wanted: StructuredOutputs, *, ignore_eos: bool = False) -> LLGuidanceGrammar | None:
        """As `compile`, but waits for nobody: None if it would have to be compiled."""
        return self._begin(wanted, self._cache.get(_digest(llguidance_source(wanted))), ignore_eos)

    def _begin(
        self, wanted: StructuredOutputs, found: LLMatcher | str | None, ignore_eos: bool
    ) -> LLGuidanceGrammar | None:
        """None: it must be compiled, for the first time or again.

        All texts of a grammar share what it has learned of its words; once that has reached a limit it is of no use.
        """
        if isinstance(found, str):
            raise invalid(f"{wanted.kind}: {found}")
        if found is None:
            return None
        assert self._vocabulary is not None
        eos = frozenset() if ignore_eos else self._eos_token_ids
        grammar = LLGuidanceGrammar(found.deep_copy(), self._vocabulary, eos)
        if grammar.error:
            return None
        if grammar.finished and not eos:
            raise invalid(f"{wanted.kind}: matches the empty text only, and nothing ends it with ignore_eos")
        return grammar

    def close(self) -> None:
        """Ends the process that tries out new grammars, and with it what is being compiled: only `find` works on."""
        self._closed = True
        if self._vocabulary is not None:
            self._vocabulary.checker.close()

    def prepare(self, *, start_checker: bool = True) -> None:
        """Builds what all grammars share, so that the first one does not wait for it: a second or more, if large.

        Args:
          start_checker: start the process that tries out new grammars, too; it takes half a second and some memory.
        """
        with self._lock:
            checker = self._shared().checker
            if start_checker:
                checker.start()

    def _shared(self) -> _Vocabulary:
        if self._vocabulary is None and not self._closed:
            self._vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
        if self._closed or self._vocabulary is None:
            raise RuntimeError("the compiler of grammars is closed")
        return self._vocabulary

    def _compile(self, source: str) -> tuple[LLMatcher | str, int | None]:
        """The compiled grammar or what is wrong with it, and the bytes that it takes; None: not to be kept."""
        vocabulary = self._shared()
        try:
            verdict = vocabulary.checker.check(source)
            if verdict.error:
                return reason(verdict.error), len(source) if verdict.lasting else None
            matcher = on_deep_stack(lambda: build_matcher(vocabulary.tokens, source))
        except Panic as error:
            return reason(f"panic: {error}"), len(source)
        except (OSError, RuntimeError) as error:
            if self._closed or not _is_want(error):
                raise
            raise UnavailableError(f"grammars cannot be tried out now: {error}") from error
        error = reason(matcher.get_error()) if matcher.is_error() else self._error_at_its_start(matcher)
        return error or matcher, len(source) + verdict.size

    def _error_at_its_start(self, matcher: LLMatcher) -> str:
        grammar = LLGuidanceGrammar(matcher.deep_copy(), self._shared(), self._eos_token_ids)
        return grammar.error.removeprefix(GRAMMAR_STUCK)


def _is_want(error: Exception) -> bool:
    """Whether the machine has no process, file or thread to give, which threading tells by a bare RuntimeError."""
    return isinstance(error, OSError) or type(error) is RuntimeError


def _digest(source: str) -> bytes:
    return hashlib.sha256(source.encode()).digest()


class GrammarCache:
    """Compiled grammars, and what was wrong with others, by digest: the least recently used make room."""

    ENTRY_BYTES = 4096  # of an entry itself, about

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._entries: OrderedDict[bytes, tuple[LLMatcher | str, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> LLMatcher | str | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: bytes, value: LLMatcher | str, size: int) -> None:
        """Adds an entry of `size` bytes; one that is larger than the whole cache is not kept."""
        size += self.ENTRY_BYTES
        if size > self._capacity:
            return
        with self._lock:
            _, before = self._entries.pop(key, ("", 0))
            self._entries[key] = value, size
            self.num_bytes += size - before
            while self.num_bytes > self._capacity:
                _, (_, freed) = self._entries.popitem(last=False)
                self.num_bytes -= freed


class _Vocabulary:
    """What all grammars of a tokenizer share.

    Attributes:
      size: ids below it may be text; llguidance's own end of the text is this id.
      plain: i32 words of a mask of the ids that are text: neither special nor EOS.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]):
        self.size = min(tokenizer.vocab_size, vocab_size)
        hidden = tokenizer.special_ids | eos_token_ids
        try:
            tokens = [b"" if i in hidden else tokenizer.token_bytes(i) for i in range(self.size)]
        except UnsupportedError as error:
            raise invalid(f"this model's tokenizer cannot be used with grammars: {error}") from error
        self.tokens: LLTokenizer = build_tokenizer(tokens)
        self.checker = GrammarChecker(tokens)
        self.plain = _mask_of([i for i, token in enumerate(tokens) if token], self.num_words)

    @property
    def num_words(self) -> int:
        """Words of llguidance's masks, which have a bit for the end."""
        return self.size // 32 + 1


class LLGuidanceGrammar:
    """One sample's way through a grammar; a `Grammar` of core/request.py.

    Attributes:
      finished: the text is complete and nothing can follow it.
      error: what went wrong, or "". Then any token is allowed, and none accepted.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: _Vocabulary, eos_token_ids: frozenset[int]):
        self._start(matcher, vocabulary, eos_token_ids, np.empty(vocabulary.num_words, np.int32))
        self._look_ahead()

    def _start(self, matcher: LLMatcher, vocabulary: _Vocabulary, eos: frozenset[int], mask: np.ndarray) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._eos_token_ids = eos
        self._mask = mask  # text that may come next; valid unless _stale
        self._address, self._num_bytes = mask.ctypes.data, mask.nbytes
        self._stale = True
        self._may_end = False
        self.finished = False
        self.error = ""

    def accept(self, token_id: int) -> bool:
        """Moves on by a sampled token. False: it cannot follow, or a limit was reached; then `error` says why."""
        if self.error:
            return False
        if token_id in self._eos_token_ids:
            self._look_ahead()
            self.finished = self._may_end
            return self._may_end or self._fail(self.error or "the text ends too early")
        if self.finished:
            return self._fail(f"token {token_id} follows a complete text")
        self._look_ahead()  # done already, as a rule: the token was drawn with this mask
        if self.error:
            return False
        if not self._allows(token_id):
            return self._fail(f"token {token_id} cannot follow")
        if not self._matcher.consume_token(token_id):
            return self._get_stuck(reason(self._matcher.get_error()) or f"after token {token_id}")
        self._stale = True
        if self._matcher.is_accepting():
            self._look_ahead()  # whether something can follow
        return not self.error

    def fill(self, mask: np.ndarray) -> None:
        """Writes which tokens may come next.

        Args:
          mask: a writable int32 NumPy row of ceil(vocab_size / 32) words; bit i of word w is token 32 w + i.
        """
        if not self.error:
            self._look_ahead()
        if self.error or (self.finished and not self._eos_token_ids):
            mask.fill(-1)  # a row that allows nothing has no distribution; `accept` refuses what comes
            return
        words = min(len(mask), len(self._mask))
        mask[:words] = self._mask[:words]
        mask[words:] = 0
        if self._may_end:
            for i in self._eos_token_ids:
                mask.view(np.uint32)[i // 32] |= np.uint32(1 << i % 32)

    def copy(self) -> LLGuidanceGrammar:
        """An independent one in the same state."""
        twin = object.__new__(LLGuidanceGrammar)
        twin._start(self._matcher.deep_copy(), self._vocabulary, self._eos_token_ids, self._mask.copy())
        twin._stale, twin._may_end, twin.finished, twin.error = self._stale, self._may_end, self.finished, self.error
        return twin

    def _look_ahead(self) -> None:
        """Computes what may follow, unless it is known."""
        if not self._stale:
            return
        self._stale = False
        self._matcher.unsafe_compute_mask_ptr(self._address, self._num_bytes)
        if self._matcher.is_error():
            self._get_stuck(reason(self._matcher.get_error()))
            return
        size = self._vocabulary.size
        self._may_end = bool(self._mask[size // 32] >> (size % 32) & 1)
        np.bitwise_and(self._mask, self._vocabulary.plain, out=self._mask)
        if not self._mask.any():
            if self._may_end:
                self.finished = True
            else:
                self._get_stuck("no token of this model can continue the text")

    def _allows(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocabulary.size and bool(self._mask[token_id // 32] >> (token_id % 32) & 1)

    def _get_stuck(self, why: str) -> bool:
        """The fault is in what was asked for."""
        return self._fail(GRAMMAR_STUCK + why)

    def _fail(self, why: str) -> bool:
        self.error = why
        return False


def _mask_of(ids: Iterable[int], num_words: int) -> np.ndarray:
    bits = np.zeros(num_words * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
