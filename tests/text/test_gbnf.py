"""GBNF becomes Lark's notation: every construct, in linear time."""

from __future__ import annotations

import time

import pytest

from jaxpaged.text.gbnf import RULE, GrammarSyntaxError, gbnf_to_lark, literal


@pytest.mark.parametrize(
    ("body", "lark"),
    [
        ('"a b"', r"/a\x{20}b/"),
        (r'"\"\\\n\x41\u00e9\U0001F642"', r"/\x{22}\x{5c}\x{a}A\x{e9}\x{1f642}/"),
        ('""', '""'),
        ("[a-z0-9]", "/[a-z0-9]/"),
        (r"[^\]\-a-]", r"/[^\x{5d}\x{2d}a\x{2d}]/"),
        (r"[-\x00-\x1f/]", r"/[\x{2d}\x{0}-\x{1f}\x{2f}]/"),
        (".", "/(?s:.)/"),
        ('"a"* "b"+ "c"? "d"{2} "e"{1,} "f"{ 0 , 3 }', "/a/ * /b/ + /c/ ? /d/ {2} /e/ {1,} /f/ {0,3}"),
        ('"a" | "b" |', '/a/ | /b/ | ""'),
        ('("a" | )+ ()', '( /a/ | "" ) + ( "" )'),
        ('"a" # no "b"', "/a/"),
        ('(\n  "a"\n  | "b"\n)', "( /a/ | /b/ )"),
        ('"a"\n  | "b"', "/a/ | /b/"),
        ("", '""'),
    ],
)
def test_bodies(body, lark):
    assert gbnf_to_lark(f"root ::= {body}") == f"start: R0\nR0: {lark}"


def test_names_and_circles():
    text = 'root ::= list tail-1 Tail_1\nlist ::= "[" list? "]"\ntail-1 ::= Tail_1 "x"\r\nTail_1::="y"'
    assert gbnf_to_lark(text).splitlines() == [
        "start: r0",
        "r0: r1 R2 R3",
        r"r1: /\x{5b}/ r1 ? /\x{5d}/",
        "R2: R3 /x/",
        "R3: /y/",
    ]


def test_a_rule_given_twice_is_refused():
    with pytest.raises(GrammarSyntaxError, match="twice"):
        gbnf_to_lark('root ::= a\na ::= "x"\na ::= "y"')


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('"a"', "line 1"),
        ("root ::= 'a'", "line 1"),
        ('root ::= "a"\nb ::= "c', "line 2"),
        ('root ::= "a" )', "not open"),
        ('root ::= ("a"', "leaves"),
        ("root ::= | *", "repeats"),
        ("root ::= [^]", "no characters"),
        (r'root ::= "\U00110000"', "no character"),
        ('a ::= "b"', "root"),
        ("root ::= a", "'a'"),
        ("", "line 1"),
    ],
)
def test_what_cannot_be_read(text, reason):
    with pytest.raises(GrammarSyntaxError, match=reason):
        gbnf_to_lark(text)


def test_time_is_linear():
    chain = "root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(10_000)) + '\nr10000 ::= "b"'
    start = time.process_time()
    gbnf_to_lark(chain)
    for text in ("(" * 200_000, "root ::= " + '"' * 99_999, "root ::= " + "[" * 200_000, "a" * 200_000, "\n" * 200_000):
        assert not RULE.search(text[20:])
        with pytest.raises(GrammarSyntaxError):
            gbnf_to_lark(text)
    assert time.process_time() - start < 2


def test_which_texts_are_gbnf():
    assert RULE.search('# comment\n  root-1 ::= "a"')
    assert not RULE.search('start: "a::=b" // x ::= y\nrule::_: "a"')


def test_literals():
    assert literal("") == '""'
    assert literal("aZ0_/\n") == r"/aZ0\x{5f}\x{2f}\x{a}/"
