"""Grammars in GBNF, the EBNF of llama.cpp, as Lark's notation. Takes time in proportion to their length.

A rule is `name ::= alternatives`, the first one to be matched is `root`. Alternatives hold "literals", [character
classes], `.`, other rules and (groups), each maybe repeated by `*`, `+`, `?` or `{m,n}`. `#` begins a comment. Line
breaks mean nothing: what ends a rule is the beginning of the next one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # found in no grammar of Lark's

_TOKEN = re.compile(
    r"""(?P<blank>\s+|\#[^\n]*) | (?P<rule>[\w-]+)\s*::= | (?P<name>[\w-]+)
      | "(?P<literal>(?:[^"\\\n]|\\.)*)" | \[(?P<characters>(?:[^\]\\]|\\.)*)\]
      | (?P<repeat>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\}) | (?P<mark>[().|])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(
    r"\\x(?P<x>[0-9a-fA-F]{2})|\\u(?P<u>[0-9a-fA-F]{4})|\\U(?P<U>[0-9a-fA-F]{8})|\\(?P<escaped>.)|.", re.S
)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


class GrammarSyntaxError(ValueError):
    """A grammar that cannot be read."""


@dataclass
class _Rule:
    """One rule: its body in Lark's notation, with `(name,)` where another rule stands."""

    name: str
    body: list[str | tuple[str]] = field(default_factory=list)
    depth: int = 0
    empty: bool = True  # nothing yet in this alternative

    @property
    def others(self) -> set[str]:
        return {part[0] for part in self.body if isinstance(part, tuple)}

    def add(self, part: str | tuple[str]) -> None:
        self.body.append(part)
        self.empty = False

    def mark(self, mark: str) -> None:
        """A parenthesis or a bar."""
        if mark != "(" and self.empty:
            self.body.append('""')
        self.body.append(mark)
        self.depth += {"(": 1, ")": -1}.get(mark, 0)
        self.empty = mark != ")"
        if self.depth < 0:
            raise GrammarSyntaxError(f"rule {self.name!r} closes a parenthesis that is not open")

    def end(self) -> None:
        if self.empty:
            self.body.append('""')
        if self.depth:
            raise GrammarSyntaxError(f"rule {self.name!r} leaves a parenthesis open")


def gbnf_to_lark(text: str) -> str:
    """The same grammar in Lark's notation.

    Raises:
      GrammarSyntaxError: it is no GBNF, names a rule that is not there, or has no `root`.
    """
    rules: dict[str, _Rule] = {}
    for rule in _rules(text):
        if rules.setdefault(rule.name, rule) is not rule:
            raise GrammarSyntaxError(f"rule {rule.name!r} is given twice")
    if "root" not in rules:
        raise GrammarSyntaxError("no rule is named root")
    for rule in rules.values():
        for other in rule.others:
            if other not in rules:
                raise GrammarSyntaxError(f"rule {rule.name!r} names {other!r}, which is not there")
    regular = _regular(rules)
    # Lark's names: in upper case for regular expressions, of which the parser sees only the whole match.
    names = {name: f"{'R' if name in regular else 'r'}{i}" for i, name in enumerate(rules)}
    lines = [f"start: {names['root']}"]
    for rule in rules.values():
        body = " ".join(part if isinstance(part, str) else names[part[0]] for part in rule.body)
        lines.append(f"{names[rule.name]}: {body}")
    return "\n".join(lines)


def literal(text: str) -> str:
    """A text in Lark's notation."""
    return f"/{''.join(map(_escape, text))}/" if text else '""'


def _rules(text: str) -> Iterator[_Rule]:
    rule, position = None, 0
    while match := _TOKEN.match(text, position):
        position = match.end()
        kind, value = match.lastgroup, match[match.lastgroup or 0]
        if kind == "rule":
            if rule is not None:
                rule.end()
                yield rule
            rule = _Rule(value)
        elif kind != "blank":
            if rule is None:
                break
            _add(rule, str(kind), value)
    if rule is None or position < len(text):
        line = text.count("\n", 0, position) + 1
        raise GrammarSyntaxError(f"line {line} cannot be read at {text[position : position + 20]!r}")
    rule.end()
    yield rule


def _add(rule: _Rule, kind: str, value: str) -> None:
    if kind == "name":
        rule.add((value,))
    elif kind == "literal":
        rule.add(literal("".join(char for char, _ in _characters(value))))
    elif kind == "characters":
        rule.add(_character_class(value))
    elif value == ".":
        rule.add("/(?s:.)/")
    elif kind == "mark":
        rule.mark(value)
    elif rule.empty:
        raise GrammarSyntaxError(f"rule {rule.name!r} repeats nothing with {value!r}")
    else:
        rule.add(re.sub(r"\s", "", value))


def _character_class(inside: str) -> str:
    negated = inside.startswith("^")
    characters = list(_characters(inside[negated:]))
    if not characters:
        raise GrammarSyntaxError(f"[{inside}] holds no characters")
    parts = [
        "-" if plain and char == "-" and 0 < i < len(characters) - 1 else _escape(char)
        for i, (char, plain) in enumerate(characters)
    ]
    return f"/[{'^' * negated}{''.join(parts)}]/"


def _characters(text: str) -> Iterator[tuple[str, bool]]:
    """Characters of a literal or class, and whether each stands for itself."""
    for match in _CHARACTER.finditer(text):
        code = match["x"] or match["u"] or match["U"]
        if code:
            if int(code, 16) > 0x10FFFF:
                raise GrammarSyntaxError(f"{match[0]} is no character")
            yield chr(int(code, 16)), False
        elif match["escaped"]:
            yield _ESCAPED.get(match["escaped"], match["escaped"]), False
        else:
            yield match[0], True


def _escape(char: str) -> str:
    """A character in a regular expression: anything but letters and digits by its number."""
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


def _regular(rules: dict[str, _Rule]) -> set[str]:
    """Names of the rules that lead into no circle."""
    waiting = {name: len(rule.others) for name, rule in rules.items()}
    users: dict[str, list[str]] = defaultdict(list)
    for name, rule in rules.items():
        for other in rule.others:
            users[other].append(name)
    ready = [name for name, count in waiting.items() if not count]
    for name in ready:  # it grows as it is read
        for user in users[name]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return set(ready)
