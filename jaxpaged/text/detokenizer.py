"""Token ids to text as they come: whole characters only, and nothing that a stop string may yet take back.

The text of byte-level BPE and SentencePiece is the concatenation of their tokens' bytes, so one UTF-8 decoder does
it. With other tokenizers each token is decoded beside the one before it. Either way a token costs the same however
long the text is.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.errors import UnsupportedError

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

_MOST_ENDS = 2  # tokens that a tokenizer puts behind a text
_REPLACEMENT = "\ufffd"
_UTF8 = codecs.getincrementaldecoder("utf-8")  # "replace" replaces what can never become a character


class Detokenizer:
    """The text of one request.

    Every token is counted, and its place in the text is known: `num_released` tokens have all their text released,
    which lets token ids and logprobs be sent with their text and never ahead of it.

    Attributes:
      stop_reason: the stop string that ended the text, else None. Tokens after it are not looked at.
      num_tokens: tokens consumed; with a `stop_reason`, the last one completed the stop string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams):
        """Starts after a prompt.

        Args:
          tokenizer: gives pieces, bytes and special ids.
          prompt_token_ids: what the text continues; only its last piece matters.
          params: `stop`, `include_stop_str_in_output`, `min_tokens`, `skip_special_tokens`,
            `shown_special_ids`, `spaces_between_special_tokens`.
        """
        skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        if params.shown_special_ids:
            skipped = skipped.difference(params.shown_special_ids)
        self._pieces = _pieces(tokenizer, prompt_token_ids, skipped, spaces=params.spaces_between_special_tokens)
        self._stops = StopMatcher(params.stop_strings) if params.stop_strings else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self.stop_reason: str | None = None
        self.num_tokens = 0
        self._released: list[str] = []
        self._num_released_chars = 0
        self._held = ""  # decoded, but it may be the front of a stop string
        self._starts: list[int] = []  # characters decoded before each token
        self._num_decoded_chars = 0
        self._unreleased: deque[int] = deque()  # characters to be released until each waiting token is out
        self._finished = False

    @property
    def text(self) -> str:
        """All text released so far."""
        if len(self._released) > 1:
            self._released = ["".join(self._released)]
        return self._released[0] if self._released else ""

    @property
    def num_released(self) -> int:
        """Tokens whose text is out; all consumed ones once the text has ended."""
        return self.num_tokens - len(self._unreleased)

    def text_offset(self, token_index: int) -> int:
        """Where the text of an output token starts, in characters; the end of the text for a token without any."""
        start = self._starts[token_index] if token_index < len(self._starts) else self._num_decoded_chars
        return min(start, self._num_released_chars) if self._finished else start

    def update(self, new_token_ids: Sequence[int]) -> str:
        """Consumes tokens and returns the text that they release, often "". After a stop string it does nothing."""
        released = ""
        for token_id in new_token_ids:
            if self._finished:
                break
            self._starts.append(self._num_decoded_chars)
            self.num_tokens += 1
            piece = self._pieces.push(token_id)
            self._num_decoded_chars += len(piece)
            if piece:
                released += self._release(piece)
            # Bytes that wait for the rest of their character come out with its last byte.
            due = self._num_decoded_chars + self._pieces.pending
            if due > self._num_released_chars and not self._finished:
                self._unreleased.append(due)
        while self._unreleased and self._unreleased[0] <= self._num_released_chars:
            self._unreleased.popleft()
        return released

    def finish(self) -> str:
        """Ends the text and returns what was held back: an incomplete character becomes one U+FFFD."""
        if self._finished:
            return ""
        return self._end(self._held + self._pieces.flush())

    def _release(self, piece: str) -> str:
        """Text that no stop string can reach any more, once `piece` has been added."""
        if self._stops is None:
            self._emit(piece)
            return piece
        match = self._stops.feed(piece, honoured=self.num_tokens >= self._min_tokens)
        if match is None:
            pending = self._held + piece
            safe = len(pending) - self._stops.num_held
            self._held = pending[safe:]
            self._emit(pending[:safe])
            return pending[:safe]
        end, self.stop_reason = match
        pending = self._held + piece[:end]
        return self._end(pending if self._include_stop else pending[: len(pending) - len(self.stop_reason)])

    def _end(self, last: str) -> str:
        self._emit(last)
        self._held = ""
        self._unreleased.clear()
        self._finished = True
        return last

    def _emit(self, text: str) -> None:
        if text:
            self._released.append(text)
            self._num_released_chars += len(text)


def prompt_text(
    tokenizer: Tokenizer, token_ids: Sequence[int], prompt: str | None, params: SamplingParams
) -> tuple[str, list[int]]:
    """A prompt's text, and where in it each of its tokens starts.

    Args:
      prompt: the text, if it was given as text: tokens that the tokenizer put around it have no place in it.
      params: `skip_special_tokens`, for a prompt that was given as tokens; `truncate_prompt_tokens`, which may have cut
        off the beginning.
    """
    if prompt is None:
        skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        return _spelled(tokenizer, token_ids, skipped)
    shift, offsets = _aligned(tokenizer, token_ids, prompt, cut=params.truncate_prompt_tokens is not None)
    return prompt, [min(max(offset + shift, 0), len(prompt)) for offset in offsets]


def _aligned(tokenizer: Tokenizer, token_ids: Sequence[int], prompt: str, *, cut: bool) -> tuple[int, list[int]]:
    """What to add to the places of tokens in their text to get those in the prompt, and the places in their text.

    Args:
      cut: the tokens may be the end of the prompt only.
    """
    text, offsets = _spelled(tokenizer, token_ids, frozenset())
    if prompt in text:
        return -text.index(prompt), offsets
    if cut:
        text, offsets = _spelled(tokenizer, token_ids, frozenset(), inside=True)
        for token_id, offset in [(None, len(text)), *zip(token_ids[::-1], offsets[::-1], strict=True)][
            : 1 + _MOST_ENDS
        ]:
            if token_id is not None and token_id not in tokenizer.special_ids:
                break
            text = text[:offset]
            whole = text.lstrip(_REPLACEMENT)  # the cut may go through a character: what is left of it starts there
            if prompt.endswith(whole):
                first = max(len(text) - len(whole) - 1, 0)
                return len(prompt) - len(text), [max(offset, first) for offset in offsets]
    # The tokenizer changes texts (say, to lower case): the nearest that can be said.
    text, offsets = _spelled(tokenizer, token_ids, tokenizer.special_ids, inside=cut)
    return len(prompt) - len(text) if cut else 0, offsets


def _spelled(
    tokenizer: Tokenizer, token_ids: Sequence[int], skipped: frozenset[int], *, inside: bool = False
) -> tuple[str, list[int]]:
    """Text of tokens, and where each starts in it. Args: inside: they do not begin a text."""
    pieces = _pieces(tokenizer, token_ids[:1] if inside else (), skipped)
    text: list[str] = []
    offsets: list[int] = []
    length = 0
    for token_id in token_ids:
        offsets.append(length)
        text.append(pieces.push(token_id))
        length += len(text[-1])
    return "".join(text) + pieces.flush(), offsets


class StopMatcher:
    """Finds stop strings in text that comes in pieces (Knuth-Morris-Pratt, all strings side by side).

    The match that ends first wins; of several that end together, the longest.
    """

    def __init__(self, stops: Sequence[str]):
        """Args: stops: strings of at least one character."""
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._first_chars = frozenset(stop[0] for stop in self._stops)

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that are the front of some stop string."""
        return max(self._matched)

    def feed(self, text: str, *, honoured: bool = True) -> tuple[int, str] | None:
        """Reads more text. Returns where in it a match ends, and which; None if nothing matched.

        Args:
          text: what follows the text read before.
          honoured: False passes over a complete match.
        """
        if not any(self._matched) and self._first_chars.isdisjoint(text):
            return None
        for position, char in enumerate(text):
            for i, stop in enumerate(self._stops):
                n, failure = self._matched[i], self._failures[i]
                while n and stop[n] != char:
                    n = failure[n]
                n += stop[n] == char
                if n == len(stop):
                    if honoured:
                        return position + 1, stop
                    n = failure[n]
                self._matched[i] = n
        return None


def _failure_table(stop: str) -> list[int]:
    """failure[n]: length of the longest proper suffix of stop[:n] that is a prefix of it."""
    failure = [0, 0]
    for char in stop[1:]:
        n = failure[-1]
        while n and stop[n] != char:
            n = failure[n]
        failure.append(n + (stop[n] == char))
    return failure


class _Pieces(Protocol):
    """Turns tokens into complete characters."""

    @property
    def pending(self) -> bool:
        """Whether bytes of an incomplete character wait."""
        ...

    def push(self, token_id: int) -> str:
        """Characters completed by this token."""
        ...

    def flush(self) -> str:
        """The incomplete character, if any, as U+FFFD."""
        ...


def _pieces(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skipped: frozenset[int], *, spaces: bool = True
) -> _Pieces:
    last = next((t for t in reversed(prompt_token_ids) if t not in skipped), None)
    try:
        tokenizer.token_bytes(0)
    except UnsupportedError:
        return _WindowPieces(tokenizer, last, skipped, spaces=spaces)
    return _BytePieces(tokenizer, last, skipped)


class _BytePieces:
    """The bytes of the tokens, joined. Where decoding drops the space of a text's first word, so does this."""

    def __init__(self, tokenizer: Tokenizer, last_prompt_token: int | None, skipped: frozenset[int]):
        self._tokenizer, self._skipped = tokenizer, skipped
        self._at_start = last_prompt_token is None
        self._utf8 = _UTF8("replace")
        self.pending = False

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        raw = self._tokenizer.token_bytes(token_id)
        if self._at_start:
            self._at_start = False
            if raw.startswith(b" ") and not self._tokenizer.decode([token_id]).startswith(" "):
                raw = raw[1:]
        if raw.isascii() and not self.pending:  # as most are
            return raw.decode()
        text = self._utf8.decode(raw)
        self.pending = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _WindowPieces:
    """Tokenizers whose tokens have no bytes of their own: a token's text is what it adds to the one before it.

    These alone put spaces between added tokens, where `spaces` lets them.
    """

    pending = False

    def __init__(self, tokenizer: Tokenizer, last_prompt_token: int | None, skipped: frozenset[int], *, spaces: bool):
        self._tokenizer, self._skipped = tokenizer, skipped
        self._unspaced = {} if spaces else tokenizer.added_tokens
        self._previous = [] if last_prompt_token is None else [last_prompt_token]

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if token_id in self._unspaced and self._previous and self._previous[0] in self._unspaced:
            self._previous = [token_id]
            return self._unspaced[token_id]
        before = self._decode(self._previous)
        after = self._decode([*self._previous, token_id])
        self._previous = [token_id]
        return after[len(before) :] if after.startswith(before) else self._decode([token_id])

    def flush(self) -> str:
        return ""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
