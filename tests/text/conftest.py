"""Compilers of grammars for tiny tokenizers."""

from __future__ import annotations

import pytest

from jaxpaged.text.grammar import GrammarCompiler
from tests.text.grammars import EOS, HEAD, TOKENIZERS


@pytest.fixture(scope="module")
def compilers():
    made = {name: GrammarCompiler(tokenizer, HEAD, [EOS]) for name, tokenizer in TOKENIZERS.items()}
    yield made
    for compiler in made.values():
        compiler.close()


@pytest.fixture
def compiler(compilers) -> GrammarCompiler:
    return compilers["byte_level"]
