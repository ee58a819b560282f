"""Grammars of the real compiler on a tiny model: valid text in any batch, and neighbours that notice nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.sampling_params import StructuredOutputs as S
from jaxpaged.engine.engine import Engine
from jaxpaged.text.grammar import GrammarCompiler
from tests.engine.tiny import VOCAB, Answer, prompt
from tests.tiny_tokenizers import TinyTokenizer, byte_alphabet, byte_level

EOS = 2
WORDS = ['{"', '":', '",', '"}', "true", "null", "ab", "abc", "no", "yes", "na", "me", "12", "345", "Ġa", "},"]


def _tokenizer() -> TinyTokenizer:
    """Printable ASCII, blanks, bytes of é and 🙂, words: fewer tokens than the head has rows."""
    chars = {byte: char for char, byte in byte_alphabet().items()}
    wanted = [*range(0x20, 0x7F), 0x0A, 0x09, *sorted(set("é🙂".encode()))]
    return byte_level(words=WORDS, alphabet=[chars[byte] for byte in wanted])


TOKENIZER = _tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["é", 12, None]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "ok", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def _is_schema(text: str) -> bool:
    value = json.loads(text)
    return len(value["name"]) <= 6 and type(value["ok"]) is bool and set(value["tags"]) <= {"é", 12, None}


WANTED: list[tuple[S, Callable[[str], object]]] = [
    (S(json=SCHEMA), _is_schema),
    (S(regex="[a-z]{2,6}(-[0-9]{1,3}){0,2}"), lambda text: re.fullmatch("[a-z]{2,6}(-[0-9]{1,3}){0,2}", text)),
    (S(choice=["yes", "no", "🙂🙂", "abcé"]), lambda text: text in ["yes", "no", "🙂🙂", "abcé"]),
    (S(grammar='root ::= [0-9] | "(" [0-9] root{1,2} ")"'), lambda text: text.count("(") == text.count(")")),
]
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=100)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TOKENIZER, VOCAB, [EOS])
    yield compiler
    compiler.close()


class Runs:
    """Requests with and without grammars through an engine, and what came of each sample."""

    def __init__(self, engine: Engine, compiler: GrammarCompiler):
        self.engine, self.compiler = engine, compiler
        self.answers: dict[tuple[str, int], Answer] = {}

    def add(self, name: str, params: SamplingParams, length: int = 9) -> None:
        wanted = params.structured_outputs
        grammar = self.compiler.compile(wanted, ignore_eos=params.ignore_eos) if wanted else None
        self.engine.add_request(self.engine.make_request(name, prompt(length), params, grammar=grammar))

    def finish(self) -> dict[tuple[str, int], Answer]:
        while self.engine.has_work:
            for update in self.engine.step():
                self.answers.setdefault((update.request_id, update.index), Answer()).take(update)
            self.engine.scheduler.check_invariants()
        return self.answers


def text(answer: Answer) -> str:
    return TOKENIZER.decode(answer.token_ids)


def alone(make_engine, compiler, params: SamplingParams, length: int = 9) -> dict[int, Answer]:
    runs = Runs(make_engine(caching=False, overlap=False, eos=[EOS]), compiler)
    runs.add("alone", params, length)
    return {index: answer for (_, index), answer in runs.finish().items()}


@pytest.mark.parametrize("blocks", [64, 11], ids=["roomy", "preempting"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
def test_valid_in_a_batch_and_as_alone(make_engine, compiler, overlap, blocks) -> None:
    runs = Runs(make_engine(overlap=overlap, blocks=blocks, eos=[EOS]), compiler)
    constrained = {
        f"{i} {base.temperature}": replace(base, structured_outputs=wanted, n=2 if base.temperature else 1)
        for i, (wanted, _) in enumerate(WANTED)
        for base in (SAMPLED, replace(SAMPLED, temperature=0.0))
    }
    plain = {f"plain {i}": replace(SAMPLED, seed=i, max_tokens=40, temperature=i % 2) for i in range(4)}
    params = {**constrained, **plain}
    lengths = {name: 9 + 3 * i for i, name in enumerate(params)}
    for name in sorted(params, key=lambda name: name[::-1]):
        runs.add(name, params[name], lengths[name])
    answers = runs.finish()
    assert (runs.engine.scheduler.num_preemptions > 0) == (blocks < 64)
    for name, options in params.items():
        right = alone(make_engine, compiler, options, lengths[name])
        for index in range(options.n):
            assert answers[name, index].token_ids == right[index].token_ids, (name, index)
            assert answers[name, index].finish_reason == right[index].finish_reason
            if name in constrained:
                assert answers[name, index].finish_reason == "stop", text(answers[name, index])
                assert WANTED[int(name[0])][1](text(answers[name, index])), text(answers[name, index])
    assert any(answers[name, 0].token_ids != answers[name, 1].token_ids for name in constrained if params[name].n > 1)


def test_how_texts_end(make_engine, compiler) -> None:
    runs = Runs(make_engine(eos=[EOS]), compiler)
    base = replace(SAMPLED, max_tokens=30)
    runs.add("whole", replace(base, structured_outputs=S(regex="abc")))
    runs.add("eos", replace(base, structured_outputs=S(regex="a*"), logit_bias={EOS: 50.0}))
    runs.add("later", replace(base, structured_outputs=S(regex="a*"), logit_bias={EOS: 50.0}, min_tokens=5))
    runs.add("on", replace(base, structured_outputs=S(regex="a*"), logit_bias={EOS: 50.0}, ignore_eos=True))
    runs.add("too few", replace(base, structured_outputs=S(regex="a{4}"), min_tokens=20))
    answers = {name: answer for (name, _), answer in runs.finish().items()}
    assert text(answers["whole"]) == "abc" and answers["whole"].finish_reason == "stop"
    assert answers["eos"].token_ids == [EOS]
    assert answers["later"].token_ids == [*TOKENIZER.byte_ids("aaaaa"), EOS]
    assert answers["on"].finish_reason == "length" and text(answers["on"]) == "a" * 30
    assert text(answers["too few"]) == "aaaa" and answers["too few"].finish_reason == "stop"


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
def test_one_that_fails_in_mid_flight_ends_alone(make_engine, compiler, overlap) -> None:
    runs = Runs(make_engine(overlap=overlap, eos=[EOS]), compiler)
    fine = replace(SAMPLED, structured_outputs=S(regex="[a-z]{20}"))
    runs.add("before", fine, 10)
    # After "abc" only a token that is no text may follow.
    runs.add("failing", replace(SAMPLED, structured_outputs=S(grammar='start: "abc" <[1]>'), n=2))
    runs.add("after", SAMPLED, 11)
    answers = runs.finish()
    for index in range(2):
        assert answers["failing", index].finish_reason == "error"
        assert "no token" in str(answers["failing", index].stop_reason)
        assert text(answers["failing", index])[:3] == "abc"
    assert answers["before", 0].token_ids == alone(make_engine, compiler, fine, 10)[0].token_ids
    assert answers["after", 0].token_ids == alone(make_engine, compiler, SAMPLED, 11)[0].token_ids


def test_masks_are_filled_while_the_device_computes(make_engine, compiler, monkeypatch) -> None:
    engine = make_engine(eos=[EOS])
    calls: list[str] = []

    def note(owner, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: calls.append(name) or original(*args, **more))

    for name in ("launch", "collect", "sample"):
        note(engine.runner, name)
    runs = Runs(engine, compiler)
    grammar = compiler.compile(S(regex="[a-z]{4}"))
    note(type(grammar), "fill")
    note(type(grammar), "accept")
    engine.add_request(
        engine.make_request("r", prompt(9), replace(SAMPLED, structured_outputs=S(regex="[a-z]{4}")), grammar=grammar)
    )
    runs.finish()
    steady = ["launch", "collect", "accept", "fill", "sample"]  # the forward pass of n + 1, then the token of n
    assert calls[3 : 3 + len(steady)] == steady, calls
