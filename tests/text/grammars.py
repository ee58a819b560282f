"""Grammars on tiny tokenizers, fed and walked."""

from __future__ import annotations

import random

import numpy as np

from jaxpaged.text.grammar import LLGuidanceGrammar
from jaxpaged.text.tokenizer import Tokenizer
from tests import tiny_tokenizers

TOKENIZERS = {"byte_level": tiny_tokenizers.byte_level(), "sentencepiece": tiny_tokenizers.sentencepiece()}
BYTE_LEVEL = TOKENIZERS["byte_level"]
EOS = 2  # of both
HEAD = 400  # rows, more than they have tokens


def allowed(grammar: LLGuidanceGrammar, head: int = HEAD) -> list[int]:
    mask = np.full(-(-head // 32), 0x55555555, np.int32)
    grammar.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def feed(grammar: LLGuidanceGrammar, text: str | bytes) -> bool:
    """Whether a text is accepted byte by byte."""
    return all(i in allowed(grammar) and grammar.accept(i) for i in BYTE_LEVEL.byte_ids(text))


def ends(grammar: LLGuidanceGrammar) -> bool:
    return grammar.finished or EOS in allowed(grammar)


def walk(grammar: LLGuidanceGrammar, tokenizer: Tokenizer, seed: int, *, head: int = HEAD, steps: int = 2000) -> str:
    """A random text of the grammar: any allowed token, now and then one that tends to close what is open."""
    rng, raw = random.Random(seed), b""
    for _ in range(steps):
        if grammar.finished:
            return raw.decode()
        ids = allowed(grammar, head)
        assert ids, raw
        closing = [i for i in ids if i == EOS or tokenizer.token_bytes(i) in (b'"', b"}", b"]", b":", b"0")]
        token = rng.choice(closing if closing and rng.random() < 0.3 else ids)
        assert grammar.accept(token), (raw, token, grammar.error)
        if token == EOS:
            assert grammar.finished
            return raw.decode()
        raw += tokenizer.token_bytes(token)
    raise AssertionError(f"no end: {raw!r}")
