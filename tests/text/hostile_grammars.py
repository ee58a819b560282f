"""Grammars that mean no good, and how they are made."""

from __future__ import annotations

import json
from collections.abc import Callable

from jaxpaged.core.sampling_params import StructuredOutputs as S


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
