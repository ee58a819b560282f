"""The benchmark of grammars, on a tiny vocabulary."""

from typing import cast

from benchmarks.grammar import COLUMNS, WANTED, Heart, Vocabulary, measure
from jaxpaged.text.grammar import GrammarCompiler
from jaxpaged.text.tokenizer import Tokenizer
from tests.tiny_tokenizers import sentencepiece


def test_every_grammar_is_measured() -> None:
    tokenizer = sentencepiece()
    vocabulary = Vocabulary(tokenizer, 500)
    tokens = [vocabulary.token_bytes(i) for i in range(500)]
    assert tokens[:300] == [tokenizer.token_bytes(i) for i in range(300)]
    assert all(len(token) <= 24 for token in tokens) and len(set(tokens[tokenizer.vocab_size :])) == 500 - len(
        tokens[: tokenizer.vocab_size]
    )
    compiler = GrammarCompiler(cast(Tokenizer, vocabulary), 500, [2])
    with Heart() as heart:
        rows = [measure(compiler, name, 500) for name in WANTED]
    compiler.close()
    assert heart.gap_ms > 0
    for row in rows:
        assert row.keys() == COLUMNS.keys()
        assert 0 < row["fill_us"] <= row["fill_p99_us"]
