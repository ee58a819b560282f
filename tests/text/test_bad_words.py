"""Words to token sequences: at the start of a text and inside a sentence."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jaxpaged.errors import InvalidRequestError
from jaxpaged.text.bad_words import bad_word_ids
from jaxpaged.text.tokenizer import Tokenizer
from tests import tiny_tokenizers

MERGES = [("d", "o"), ("do", "g"), ("Ġ", "dog"), ("c", "a"), ("ca", "t"), ("Ġ", "c"), ("Ġc", "a")]


@pytest.fixture(scope="module")
def merging() -> Tokenizer:
    """Byte-level; knows "dog" and " dog" as a token, "cat" as one, and " cat" as " ca" and "t"."""
    pieces = ["<s>", *sorted(tiny_tokenizers.byte_alphabet()), *("".join(pair) for pair in MERGES)]
    backend = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[*MERGES[:5], *MERGES[5:]]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))


def spelled(tokenizer: Tokenizer, words: list[str] | None) -> list[list[str]]:
    return [[tokenizer.token_bytes(i).decode() for i in ids] for ids in bad_word_ids(tokenizer, words)]


def test_a_word_is_banned_at_the_start_and_inside_a_sentence(merging) -> None:
    assert spelled(merging, ["dog"]) == [["dog"], [" dog"]]


def test_a_leading_space_makes_no_difference_and_nothing_is_there_twice(merging) -> None:
    assert spelled(merging, [" dog", "dog"]) == [["dog"], [" dog"]]


def test_a_space_that_is_a_token_of_its_own_needs_no_second_ban(merging) -> None:
    assert spelled(merging, ["xy"]) == [["x", "y"]]


@pytest.mark.parametrize("word", ["dog cat", "ca\nt", "日本", " ", "\n"])
def test_sequences_spell_their_word(merging, word) -> None:
    for pieces in bad_word_ids(merging, [word]):
        text = b"".join(map(merging.token_bytes, pieces)).decode()
        assert text.removeprefix(" ") == word.removeprefix(" ")


def test_a_word_that_is_spelled_as_nothing_is_refused(merging) -> None:
    backend = Backend.from_str(merging.hf.backend_tokenizer.to_str())
    backend.normalizer = normalizers.Replace("\u200b", "")
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))
    assert spelled(tokenizer, ["d\u200bog"]) == [["dog"], [" dog"]]
    for words in (["\u200b"], ["dog", "\u200b"]):
        with pytest.raises(InvalidRequestError, match="u200b") as caught:
            bad_word_ids(tokenizer, words)
        assert caught.value.param == "bad_words"


def test_no_words() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    assert bad_word_ids(tokenizer, None) == bad_word_ids(tokenizer, []) == []


def test_sentencepiece_words_carry_no_bos() -> None:
    tokenizer = tiny_tokenizers.sentencepiece()
    for ids in bad_word_ids(tokenizer, ["Hello", "x"]):
        assert tokenizer.bos_token_id not in ids and ids


def test_from_many_threads(merging) -> None:
    """B28."""
    barrier = threading.Barrier(8)

    def work(_: int) -> list[list[int]]:
        barrier.wait()
        return [bad_word_ids(merging, ["dog", "cat", "日本"]) for _ in range(50)][-1]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    assert results == [results[0]] * 8
