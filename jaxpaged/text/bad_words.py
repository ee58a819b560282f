"""Words that a text must not hold, as the token sequences that spell them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxpaged.errors import InvalidRequestError

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str] | None) -> list[list[int]]:
    """Token sequences of each word, as it is spelled at the start of a text and behind a space.

    A sequence that ends with another one of the same word needs no ban of its own.

    Raises:
      InvalidRequestError: a word has no tokens at all.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words or ():
        bare = word.lstrip(" ") or word
        plain = tuple(tokenizer.encode(bare, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(f" {bare}", add_special_tokens=False))
        if not plain:
            raise InvalidRequestError(
                f"bad_words holds {word!r}, of which the tokenizer leaves nothing", param="bad_words"
            )
        sequences[plain] = None
        if spaced[-len(plain) :] != plain:
            sequences[spaced] = None
    return [list(sequence) for sequence in sequences if sequence]
