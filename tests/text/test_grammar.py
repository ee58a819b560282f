"""Cases S09, S10, S11 and their kinds: what a grammar allows is valid, whole and bounded, whoever wrote it."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from jaxpaged.core.request import GRAMMAR_STUCK
from jaxpaged.core.sampling_params import StructuredOutputs as S
from jaxpaged.errors import InvalidRequestError
from jaxpaged.text import grammar_check
from jaxpaged.text.grammar import GrammarCache, GrammarCompiler
from jaxpaged.text.tokenizer import Tokenizer
from tests.text.grammars import BYTE_LEVEL, EOS, HEAD, TOKENIZERS, allowed, ends, feed, walk
from tests.text.hostile_grammars import multiples

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 9},
        "age": {"type": "integer", "minimum": 7, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "é", 3, None]}, "minItems": 1, "maxItems": 3},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "next": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {"leaf": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}


def is_person(text: str) -> None:
    person = json.loads(text)
    assert {"name", "age", "tags"} <= set(person) <= set(PERSON["properties"])
    assert 2 <= len(person["name"]) <= 9
    assert type(person["age"]) is int and 7 <= person["age"] <= 130
    assert 1 <= len(person["tags"]) <= 3 and all(t in ["a", "é", 3, None] for t in person["tags"])
    assert re.fullmatch("[0-9]{5}", person.get("zip", "00000"))
    assert person.get("next") is None or isinstance(person["next"]["x"], (int, float))


def is_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def matches(pattern: str) -> Callable[[str], None]:
    return lambda text: _assert(re.fullmatch(pattern, text), text)


def _assert(truth: Any, text: str) -> None:
    assert truth, text


CHOICES = ["yes", "no", "né", "/a b/", 'say "hi"\\', "line\nline", "\x00\x7f", "🙂", "nobody"]
SUMS = 'start: sum\nsum: sum "+" term | term\nterm: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}/'
GBNF = """
# an expression
root  ::= term ("+" term)*   # sums
term  ::= num | "(" root ")"
num   ::= [0-9] [0-9]? | "\\x41" | [^0-9()+a-zA-Z\\]\\n\\x00-\\x1f\\x7f-\\U0010ffff]{1,2}
"""


def is_sum(text: str) -> None:
    assert eval(text, {}) >= 0 if not re.search(r"\b0\d", text) else re.fullmatch(r"[0-9+()]+", text)


VALID: dict[str, tuple[S, Callable[[str], None]]] = {
    "json": (S(json=PERSON), is_person),
    "json text": (S(json=json.dumps(PERSON)), is_person),
    "json_object": (S(json_object=True), is_object),
    "any json": (S(json={}), json.loads),
    "regex": (S(regex=r"[A-Z][a-z]{2,5}-(\d{2}|é+x)"), matches(r"[A-Z][a-z]{2,5}-(\d{2}|é+x)")),
    "regex of any text": (S(regex=r"(.|\n){3,9}"), matches(r"(.|\n){3,9}")),
    "choice": (S(choice=CHOICES), lambda text: _assert(text in CHOICES, text)),
    "lark": (S(grammar=SUMS), is_sum),
    "gbnf": (S(grammar=GBNF), matches(r"[^\n]+")),
    "lark with json": (S(grammar='start: "<" %json {"type":"integer"} ">"'), matches("<-?[0-9]+>")),
}


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("case", VALID)
def test_any_walk_through_the_masks_is_valid(compilers, tokenizer, case):
    wanted, check = VALID[case]
    texts = {walk(compilers[tokenizer].compile(wanted), TOKENIZERS[tokenizer], seed) for seed in range(12)}
    for text in texts:
        check(text)
    assert len(texts) > 2


def test_a_real_vocabulary(demo_tokenizer):
    compiler = GrammarCompiler(demo_tokenizer, 49152, [2])
    for seed in range(5):
        is_person(walk(compiler.compile(S(json=PERSON)), demo_tokenizer, seed, head=49152))
    compiler.close()


@pytest.fixture(scope="module")
def demo_tokenizer() -> Tokenizer:
    from jaxpaged.checkpoint.source import open_model

    return Tokenizer.from_source(open_model("demo"))


@pytest.mark.parametrize("case", ["json", "regex", "choice", "lark"])
def test_the_mask_is_what_is_accepted(compiler, case):
    grammar = compiler.compile(VALID[case][0])
    rng = random.Random(0)
    for _ in range(25):
        ids = allowed(grammar)
        for token in rng.sample(range(-1, HEAD + 5), 60):
            assert grammar.copy().accept(token) == (token in ids), token
        if grammar.finished or not (plain := [i for i in ids if i != EOS]):
            break
        assert grammar.accept(rng.choice(plain))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_special_tokens_and_ids_without_a_token_never_come(compilers, tokenizer):
    anything = compilers[tokenizer].compile(S(regex=r"(.|\n)*"))
    ids = allowed(anything)
    assert set(ids) - {EOS} <= set(range(3, TOKENIZERS[tokenizer].vocab_size))
    # Whatever can begin a text: every byte but those that begin no character.
    plain = [i for i in range(3, TOKENIZERS[tokenizer].vocab_size) if TOKENIZERS[tokenizer].token_bytes(i)[0] < 0x80]
    assert set(plain) <= set(ids)


def test_a_grammar_that_names_special_tokens_is_refused_or_kept_from_them(compiler):
    with pytest.raises(InvalidRequestError, match="unknown special token"):
        compiler.compile(S(grammar="start: <|im_start|>"))
    grammar = compiler.compile(S(grammar="start: <[0-200]>"))
    assert set(allowed(grammar)) & {0, 1, 2} == set()
    with pytest.raises(InvalidRequestError, match="no token"):
        compiler.compile(S(grammar="start: <[1]>"))


def test_eos_comes_where_the_text_may_end(compiler):
    grammar = compiler.compile(S(regex="ab*"))
    assert EOS not in allowed(grammar)
    assert feed(grammar, "a") and EOS in allowed(grammar) and not grammar.finished
    assert feed(grammar, "bb") and grammar.accept(EOS) and grammar.finished
    assert allowed(grammar) == [EOS] or grammar.accept(BYTE_LEVEL.byte_ids("b")[0]) is False
    early = compiler.compile(S(regex="ab*"))
    assert not early.accept(EOS) and early.error and not early.error.startswith(GRAMMAR_STUCK) and not early.finished
    assert not early.accept(BYTE_LEVEL.byte_ids("a")[0])


def test_a_text_that_nothing_can_follow_is_finished(compiler):
    for wanted, text in [
        (S(choice=["yes", "no"]), "no"),
        (S(regex="a{3}"), "aaa"),
        (S(json_object=True), '{"a": [1]}'),
        (S(grammar='root ::= "x" root | "y"'), "xxy"),
    ]:
        grammar = compiler.compile(wanted)
        assert not grammar.finished
        assert feed(grammar, text[:-1]) and not grammar.finished
        assert feed(grammar, text[-1]) and grammar.finished
        assert allowed(grammar) == [EOS]


def test_without_eos_the_text_goes_on_while_it_can(compiler):
    wanted = S(regex="a{1,3}")
    grammar = compiler.compile(wanted, ignore_eos=True)
    assert feed(grammar, "aa") and EOS not in allowed(grammar) and not grammar.finished
    assert feed(grammar, "a") and grammar.finished and not grammar.error
    with pytest.raises(InvalidRequestError, match="empty text"):
        compiler.compile(S(regex=""), ignore_eos=True)
    assert allowed(compiler.compile(S(regex=""))) == [EOS]


def test_every_eos_id_is_an_end_and_no_text():
    a = BYTE_LEVEL.byte_ids("a")[0]
    compiler = GrammarCompiler(BYTE_LEVEL, HEAD, [EOS, 0, 399, a])  # one beyond the tokenizer, one a plain token
    grammar = compiler.compile(S(regex="b+|a"))
    assert a not in allowed(grammar)
    assert grammar.accept(BYTE_LEVEL.byte_ids("b")[0])
    assert set(allowed(grammar)) >= {EOS, 0, 399, a} and grammar.copy().accept(399)
    compiler.close()


def test_characters_spread_over_tokens(compiler):
    grammar = compiler.compile(S(choice=["é🙂", "è"]))
    raw = "é🙂".encode()
    for i, byte in enumerate(raw):
        ids = allowed(grammar)
        assert set(ids) == set(BYTE_LEVEL.byte_ids(raw[i : i + 1])) | (
            set(BYTE_LEVEL.byte_ids("è".encode()[1:])) if i == 1 else set()
        )
        assert grammar.accept(BYTE_LEVEL.byte_ids(bytes([byte]))[0])
    assert grammar.finished


def test_blanks_in_json_are_bounded(compiler):
    grammar = compiler.compile(S(json=PERSON))
    assert feed(grammar.copy(), '{"name": "ab", "age": 7,\n        "tags": ["a"]\n}')
    assert feed(grammar.copy(), '{"name":"ab","age":7,"tags":["a"]}')
    assert not feed(grammar.copy(), "{     ") and not feed(grammar.copy(), "{\n\n")
    assert not feed(grammar, "{\n" + " " * 41)
    free = compiler.compile(S(json={**PERSON, "x-guidance": {"whitespace_pattern": "[ ]*"}}))
    assert feed(free, "{" + " " * 100) and not feed(free, "\n")
    compact = compiler.compile(S(json={**PERSON, "x-guidance": {"whitespace_flexible": False}}))
    assert feed(compact.copy(), '{"name":"ab"') and not feed(compact, "{ ")


def test_copies_go_their_own_ways(compiler):
    grammar = compiler.compile(S(regex="(ab|ac)d*"))
    assert feed(grammar, "a")
    other = grammar.copy()
    assert feed(grammar, "b") and feed(other, "c")
    third = other.copy()
    assert not third.accept(EOS + 1) and third.error == f"token {EOS + 1} cannot follow" and not other.error
    assert third.copy().error
    assert feed(grammar, "dd") and ends(grammar) and ends(other)


def test_equal_requests_share_a_compilation(monkeypatch):
    compiler = GrammarCompiler(BYTE_LEVEL, HEAD, [EOS])
    checked, check = [], grammar_check.GrammarChecker.check
    monkeypatch.setattr(
        grammar_check.GrammarChecker, "check", lambda self, source: checked.append(source) or check(self, source)
    )
    wanted = [S(regex=f"a{{{i}}}b") for i in (1, 2, 3)]
    with ThreadPoolExecutor(8) as pool:
        grammars = list(pool.map(compiler.compile, wanted * 10))
    assert len(checked) == 3
    for i, grammar in enumerate(grammars):
        assert feed(grammar, "a" * (i % 3 + 1) + "b") and grammar.finished
    for _ in range(3):  # what is wrong is remembered, too
        with pytest.raises(InvalidRequestError):
            compiler.compile(S(regex="("))
    assert len(checked) == 4
    compiler.close()


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (S(json={"type": "stsring"}), "Invalid type: stsring"),
        (S(json="{"), "json"),
        (S(json="[1]"), "object"),
        (S(json='{"const": NaN}'), "NaN"),
        (S(json={"const": float("inf")}), "JSON"),
        (S(json={"const": {1, 2}}), "json"),
        (S(json="false"), "no text"),
        (S(json={"const": "\ud800"}), "surrogates"),
        (S(json={"$ref": "http://127.0.0.1:9/x.json"}), "does not fetch"),
        (S(json={"$ref": "#/$defs/none"}), "none"),
        (S(json={"type": "string", "format": "no-such"}), "format"),
        (S(json={"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (S(json={"$ref": "#"}), "no text"),
        (S(regex="["), "unclosed character class"),
        (S(regex="(?<=a)b"), "look-behind"),
        (S(regex=r"(a)\1"), "backreferences"),
        (S(regex="\ud800"), "surrogates"),
        (S(choice=["\ud800"]), "regex"),
        (S(grammar="start: ("), "grammar"),
        (S(grammar="begin: /a/"), "start"),
        (S(grammar="start: start"), "no text"),
        (S(grammar='main ::= "a"'), "root"),
        (S(grammar="root ::= root"), "no text"),
        (S(grammar='root ::= "a'), "line 1"),
        (S(grammar="root ::= other"), "other"),
        (S(grammar="root ::= (other"), "open"),
        (S(grammar="root ::= *"), "repeats"),
        (S(grammar="root ::= []"), "no characters"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_short(compiler, wanted, reason):
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        compiler.compile(wanted)
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_known_grammars_wait_for_no_other_and_closing_for_none():
    compiler = GrammarCompiler(BYTE_LEVEL, HEAD, [EOS])
    known = S(regex="ab")
    assert compiler.find(known) is None
    compiler.compile(known)
    with ThreadPoolExecutor(4) as pool:
        hard = [pool.submit(compiler.compile, S(json=multiples(123_456_001 + 2 * i))) for i in range(8)]
        time.sleep(0.05)
        assert feed(compiler.find(known), "ab") and feed(compiler.compile(known), "ab")
        assert not any(future.done() for future in hard[4:])
        compiler.close()
        start = time.monotonic()
        errors = [str(future.exception()) for future in hard]
        assert time.monotonic() - start < 3 and sum("closed" in error for error in errors) >= 7
    child = compiler._vocabulary.checker._child
    assert child is None or child.poll() is not None


def test_a_tokenizer_whose_bytes_are_unknown_is_refused():
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        GrammarCompiler(tokenizer, 2).compile(S(regex="a"))


def test_the_cache_drops_the_least_recently_used():
    entry = GrammarCache.ENTRY_BYTES
    cache = GrammarCache(3 * (entry + 100))
    for key in (b"a", b"b", b"c"):
        cache.put(key, key.decode(), 100)
    assert cache.get(b"a") == "a"
    cache.put(b"d", "d", 50)
    assert [cache.get(k) for k in (b"a", b"b", b"c", b"d")] == ["a", None, "c", "d"]
    cache.put(b"huge", "huge", 4 * entry)
    assert cache.get(b"huge") is None and len(cache) == 3
    assert cache.num_bytes == 3 * entry + 250
