"""Cases S09, S10, S11 and their kinds: what a grammar allows is valid, whole and bounded, whoever wrote it."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from jaxpaged.core.request import GRAMMAR_STUCK
from jaxpaged.core.sampling_params import StructuredOutputs as S
from jaxpaged.errors import InvalidRequestError
from jaxpaged.text import grammar_check
from jaxpaged.text.grammar import GrammarCache, GrammarCompiler, LLGuidanceGrammar
from jaxpaged.text.tokenizer import Tokenizer
from tests import tiny_tokenizers
from tests.memory import resident

TOKENIZERS = {"byte_level": tiny_tokenizers.byte_level(), "sentencepiece": tiny_tokenizers.sentencepiece()}
BYTE_LEVEL = TOKENIZERS["byte_level"]
EOS = 2  # of both
HEAD = 400  # rows, more than they have tokens


@pytest.fixture(scope="module")
def compilers():
    made = {name: GrammarCompiler(tokenizer, HEAD, [EOS]) for name, tokenizer in TOKENIZERS.items()}
    yield made
    for compiler in made.values():
        compiler.close()


@pytest.fixture
def compiler(compilers) -> GrammarCompiler:
    return compilers["byte_level"]


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


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def chain(step: Callable[[int], str], last: str, length: int) -> str:
    return "\n".join([step(i) for i in range(length)] + [last])


def definitions(make: Callable[[dict], dict], depth: int) -> dict:
    defs = {f"d{i}": make({"$ref": f"#/$defs/d{i + 1}"}) for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{depth}": {"type": "string"}}}


def optional(count: int) -> dict:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def multiples(*of: int) -> dict:
    return {"type": "integer", "allOf": [{"multipleOf": i} for i in of]}


HOSTILE = {
    "(a+)+b": S(regex="(a+)+b"),
    "(a|a)*c": S(regex="(a|a)*c"),
    "(.*a){30}": S(regex="(.*a){30}"),
    "repeat": S(regex="a{1,1000000000}"),
    "repeated repeats": S(regex="((a{1,100}){1,100}){1,100}"),
    "a megabyte": S(regex="a" * 1_000_000),
    "long": S(regex="ab" * 100_000),
    "deep regex": S(regex="(" * 10_000 + "a" + ")" * 10_000),
    "unicode": S(regex=r"(\w|\d|\s|\p{L}){1,2000}"),
    "deep schema": S(json=nested(10_000)),
    "deep schema text": S(json='{"items":' * 30_000 + "{}" + "}" * 30_000),
    "deep enough": S(json=nested(60)),
    "enum of 100 000": S(json={"enum": [f"value {i}" for i in range(100_000)]}),
    "enum of 5 000": S(json={"enum": [f"value {i}" for i in range(5_000)]}),
    "minItems": S(json={"type": "array", "minItems": 1_000_000_000}),
    "minLength": S(json={"type": "string", "minLength": 1_000_000_000}),
    "10 000 properties": S(json=optional(10_000)),
    "1 000 properties": S(json=optional(1_000)),
    "multiples": S(json=multiples(97, 89, 83, 79)),
    "multiple": S(json=multiples(123_456_789)),
    "chain of references": S(json=definitions(lambda ref: {"properties": {"x": ref}}, 3_000)),
    "chain of intersections": S(json=definitions(lambda ref: {"allOf": [ref, {"minLength": 1}]}, 3_000)),
    "tree of references": S(json=definitions(lambda ref: {"prefixItems": [ref] * 10}, 30)),
    "tree of intersections": S(json=definitions(lambda ref: {"anyOf": [ref, {"allOf": [ref, ref]}]}, 25)),
    "choices": S(choice=[f"choice {i}" for i in range(100_000)]),
    "long choices": S(choice=["x" * 7_000 + str(i) for i in range(4_096)]),
    "a choice of control characters": S(choice=["\x01" * (5 << 20)]),
    "parentheses": S(grammar="start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "open parentheses": S(grammar="start: " + "(" * 30_000),
    "EBNF parentheses": S(grammar="root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "a literal times 30 000": S(grammar='root ::= "(" * 30000'),
    "EBNF chain": S(grammar=chain(lambda i: f'r{i} ::= "a" r{i + 1}', 'r9000 ::= "b"\nroot ::= r0', 9_000)),
    "chain of rules": S(grammar=chain(lambda i: f"r{i}: r{i + 1}", 'r15000: "b"\nstart: r0', 15_000)),
    "chain of terminals": S(grammar=chain(lambda i: f"T{i}: T{i + 1}", 'T15000: "b"\nstart: T0', 15_000)),
    "doubling rules": S(grammar=chain(lambda i: f'r{i}: r{i + 1} r{i + 1} | ""', 'r40: "b"\nstart: r0', 40)),
    "doubling terminals": S(grammar=chain(lambda i: f"T{i}: T{i + 1} T{i + 1}", 'T40: "b"\nstart: T0', 40)),
    "ambiguous": S(grammar='start: start start | "a" | ""'),
    "repeated rules": S(grammar='start: (("a"{1,1000}){1,1000}){1,1000}'),
    "parametric": S(grammar='start: p::0\np::_: "a" p::incr(_)'),
    "multiples in a grammar": S(grammar=f"start: %json {json.dumps(multiples(97, 89, 83, 79))}"),
}  # fmt: skip


class Heart:
    """A thread beside the work, and for how long the work kept it from running.

    In processor time of the process: other work on the machine does not count.
    """

    def __enter__(self) -> Heart:
        self.gap, self._stop = 0.0, False
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()
        return self

    def _beat(self) -> None:
        last = time.process_time()
        while not self._stop:
            time.sleep(0.002)
            now = time.process_time()
            self.gap, last = max(self.gap, now - last), now

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_input_is_answered_soon(compiler, case):
    compiler.prepare()
    start, wall = time.process_time(), time.monotonic()
    with Heart() as heart:
        try:
            grammar = compiler.compile(HOSTILE[case])
        except InvalidRequestError as error:
            assert len(str(error)) < 400
        else:
            rng = random.Random(0)
            for _ in range(40):
                if grammar.finished or grammar.error:
                    break
                grammar.accept(rng.choice(allowed(grammar)))
    # The child has a limit of its own. Processor time, as other work on the machine is no fault of ours.
    assert time.process_time() - start < 2 - grammar_check.CPU_SECONDS
    assert time.monotonic() - wall < 30
    assert heart.gap < 0.5
    assert feed(compiler.compile(S(regex="ab")), "ab")


def test_a_limit_within_a_text_is_an_error_of_that_text(compiler):
    grammar = compiler.compile(S(regex="((a{1,100}){1,100}){1,100}"))
    other = compiler.compile(S(regex="((a{1,100}){1,100}){1,100}"))
    a = BYTE_LEVEL.byte_ids("a")[0]
    for _ in range(200):
        if not grammar.accept(a):
            break
    assert grammar.error.startswith(GRAMMAR_STUCK)  # it is no fault of ours
    assert "too many" in grammar.error and "\n" not in grammar.error
    assert not grammar.accept(a) and not grammar.finished
    assert len(allowed(grammar)) >= HEAD  # a row that allows nothing would have no distribution
    assert allowed(other) == [i for i in range(HEAD) if i in (a,)]


def test_a_grammar_that_has_reached_a_limit_is_compiled_anew():
    """Its texts share what it has learned of its words: one of them must not spoil it for good."""
    compiler = GrammarCompiler(BYTE_LEVEL, HEAD, [EOS])
    wanted, a = S(regex="((a{1,100}){1,100}){1,100}"), BYTE_LEVEL.byte_ids("a")[0]
    lengths = []
    for _ in range(2):
        grammar = compiler.compile(wanted)
        lengths.append(next(n for n in range(200) if not grammar.accept(a)))
        assert compiler.find(wanted) is None
    assert lengths[0] == lengths[1] > 5
    assert len(compiler._cache) == 1 and compiler._cache.num_bytes < 2 * compiler._cache._entries.popitem()[1][1]
    compiler.close()


def test_the_child_comes_back_until_it_is_closed():
    compiler = GrammarCompiler(BYTE_LEVEL, HEAD, [EOS])
    compiler.compile(S(regex="x1"))
    child = compiler._vocabulary.checker._child
    assert child.poll() is None
    child.kill()  # by somebody: no fault of the next grammar's
    assert feed(compiler.compile(S(regex="x2")), "x2")
    with pytest.raises(InvalidRequestError, match="too much"):
        compiler.compile(S(json=multiples(101, 103, 107, 109)))
    assert feed(compiler.compile(S(regex="x3")), "x3")
    compiler.close()
    assert compiler._vocabulary.checker._child.poll() is not None
    assert feed(compiler.find(S(regex="x3")), "x3") and compiler.find(S(regex="x4")) is None
    with pytest.raises(RuntimeError, match="closed"):
        compiler.compile(S(regex="x4"))


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


def test_a_fault_on_the_deep_stack_is_told():
    with pytest.raises(grammar_check.Panic, match="oops"):
        grammar_check.on_deep_stack(lambda: exec("raise KeyboardInterrupt('oops')"))


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


@pytest.mark.parametrize("count", [400, pytest.param(5_000, marks=pytest.mark.slow)])
def test_memory_is_flat_over_many_schemas(count):
    compiler = GrammarCompiler(BYTE_LEVEL, HEAD, [EOS], cache_bytes=2 << 20)
    sizes = []
    for i in range(count):
        fields = {f"field {i} {j}": {"type": "string", "maxLength": i + j} for j in range(20)}
        allowed(compiler.compile(S(json={"type": "object", "properties": fields})))
        sizes.append(resident())
    assert 5 < len(compiler._cache) < 100
    assert compiler._cache.num_bytes <= 2 << 20
    assert sizes[-1] - sizes[count // 4] < 8
    compiler.close()


def test_an_interrupted_check_leaves_no_answer_for_the_next(compiler, monkeypatch):
    """The child's answer to what was interrupted must not be taken for that to another grammar."""
    read, interrupts = grammar_check._read, [KeyboardInterrupt()]

    def interrupted(pipe):
        if interrupts:
            raise interrupts.pop()
        return read(pipe)

    compiler.prepare()
    monkeypatch.setattr(grammar_check, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compiler.compile(S(regex="first[0-9]"))
    with pytest.raises(InvalidRequestError, match="regex"):
        compiler.compile(S(regex="((B"))
    compiler.compile(S(choice=["yes", "no"]))


def test_the_child_lives_within_what_this_process_may_have():
    """Under `ulimit -v` there is a hard limit, which nobody can raise."""
    code = (
        "import resource; from jaxpaged.text import grammar_check as g, grammar_source as s\n"
        "from jaxpaged.core.sampling_params import StructuredOutputs\n"
        "resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))\n"
        "checker = g.GrammarChecker([bytes([i]) for i in range(256)])\n"
        "print(repr(checker.check(s.llguidance_source(StructuredOutputs(regex='a+'))).error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "''", done.stderr


def test_what_keeps_the_child_from_starting_is_told(monkeypatch):
    monkeypatch.setattr(grammar_check.sys, "path", [])  # of which the child's is made
    monkeypatch.setattr(grammar_check, "__file__", "/no/such/file.py")
    with pytest.raises(RuntimeError, match=r"does not start.*No such file"):
        grammar_check.GrammarChecker([b"a"]).check("")


def test_a_verdict_that_somebody_else_caused_is_not_kept(compiler, monkeypatch):
    verdicts = [grammar_check.Verdict(grammar_check.TOO_HARD, 0, lasting=False)]
    check = grammar_check.GrammarChecker.check
    monkeypatch.setattr(
        grammar_check.GrammarChecker, "check", lambda self, source: verdicts.pop() if verdicts else check(self, source)
    )
    with pytest.raises(InvalidRequestError, match="too much time"):
        compiler.compile(S(regex="kept|not"))
    compiler.compile(S(regex="kept|not"))
