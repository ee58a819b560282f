"""Tokenizers from GGUF metadata: SentencePiece merging against llama.cpp's rule, byte-level cuts, special tokens."""

from __future__ import annotations

import heapq
import random
import re
from pathlib import Path

import pytest

from jaxpaged.errors import ModelError, UnsupportedError
from jaxpaged.text.gguf_tokenizer import SPACE, TokenType, gguf_tokenizer
from jaxpaged.text.pretokenizers import PRE_TOKENIZERS
from jaxpaged.text.tokenizer import Tokenizer
from tests.tiny_tokenizers import byte_alphabet

N, U, C, D, B = TokenType.NORMAL, TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.BYTE


def spm_metadata(pieces: dict[str, float], *, user: tuple[str, ...] = (), **changes):
    """<unk> <s> </s>, 256 bytes, then pieces with scores, then user-defined tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, *user]
    types = [U, C, C, *[B] * 256, *[N] * len(pieces), *[D] * len(user)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(t) for t in types],
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()) + [0.0] * len(user),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def bpe_metadata(words: list[tuple[str, str]], *, pre: str, special: dict[str, int] | None = None, **changes):
    """Bytes, then one token per merge, then `special` tokens of the given types."""
    special = special or {}
    tokens = [*sorted(byte_alphabet()), *(a + b for a, b in words), *special]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(N)] * (256 + len(words)) + [int(t) for t in special.values()],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in words],
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def build(metadata) -> Tokenizer:
    """Also for transformers it is the same tokenizer: nothing is left for that to add."""
    described = gguf_tokenizer(metadata)
    assert described.to_transformers().backend_tokenizer.to_str() == described.backend.to_str()
    return Tokenizer(described)


def merge_by_score(text: str, pieces: dict[str, float]) -> list[str]:
    """llama.cpp's way, written plainly: of neighbours that make a piece the best score first, then the leftmost."""
    symbols = list(text)
    queue: list[tuple[float, int, str, str]] = []
    alive = list(range(len(symbols)))

    def offer():
        queue.clear()
        for position in range(len(alive) - 1):
            left, right = symbols[alive[position]], symbols[alive[position + 1]]
            if left + right in pieces:
                heapq.heappush(queue, (-pieces[left + right], position, left, right))

    offer()
    while queue:
        _, position, left, right = queue[0]
        symbols[alive[position]] = left + right
        del alive[position + 1]
        offer()
    return [symbols[i] for i in alive]


def random_pieces(rng: random.Random) -> dict[str, float]:
    """A vocabulary as training leaves it: every piece is made of two earlier, better-scored ones."""
    pieces = {letter: -1000.0 - i for i, letter in enumerate("abc" + SPACE)}
    made = list(pieces)
    for rank in range(40):
        piece = rng.choice(made) + rng.choice(made)
        if piece not in pieces and len(piece) <= 8:
            pieces[piece] = -float(rank)
            made.append(piece)
    return pieces


@pytest.mark.parametrize("seed", range(8))
def test_sentencepiece_merges_as_llama_cpp_does(seed):
    rng = random.Random(seed)
    pieces = random_pieces(rng)
    tokenizer = build(spm_metadata(pieces))
    tokens = tokenizer.hf.convert_ids_to_tokens
    for _ in range(200):
        text = "".join(rng.choice("abc ") for _ in range(rng.randrange(1, 30)))
        expected = merge_by_score((" " + text).replace(" ", SPACE), pieces)
        assert tokens(tokenizer.encode(text, add_special_tokens=False)) == expected, text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_equals_the_sentencepiece_library(tmp_path):
    spm = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(re.sub(r"[^ -~\n]", "", Path(__file__).read_text(encoding="utf-8")) * 3)
    spm.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "m"),
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    model = spm.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    count = model.get_piece_size()
    types = [
        U if model.is_unknown(i) else C if model.is_control(i) else B if model.is_byte(i) else N for i in range(count)
    ]
    tokenizer = build(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(count)],
            "tokenizer.ggml.token_type": [int(t) for t in types],
            "tokenizer.ggml.scores": [model.get_score(i) for i in range(count)],
            "tokenizer.ggml.bos_token_id": model.bos_id(),
            "tokenizer.ggml.eos_token_id": model.eos_id(),
            "tokenizer.ggml.unknown_token_id": model.unk_id(),
        }
    )
    texts = [
        "def test(tmp_path):\n    assert 12345 == x",
        "  two  spaces ",
        "日本 🙂 é",
        "\t\n",
        "the tokens of the model",
        "",
    ]
    for text in texts:
        ids = model.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == model.decode(ids) == text, text


def test_bytes_stand_for_characters_that_have_no_piece():
    tokenizer = build(spm_metadata({SPACE: -1.0, "a": -2.0}))
    assert tokenizer.hf.convert_ids_to_tokens(tokenizer.encode("a🙂", add_special_tokens=False)) == [
        SPACE,
        "a",
        *(f"<0x{b:02X}>" for b in "🙂".encode()),
    ]
    ids = tokenizer.encode("a🙂")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"<s>", b" ", b"a", *(bytes([b]) for b in "🙂".encode())]
    assert tokenizer.decode(ids) == "a🙂"
    assert tokenizer.decode(ids[:-1]) == "a�"


def test_space_prefix_is_put_before_the_text_and_after_special_tokens():
    pieces = {SPACE: -1.0, "a": -2.0, "b": -3.0, SPACE + "a": -0.5}
    with_prefix = build(spm_metadata(pieces))
    tokens = with_prefix.hf.convert_ids_to_tokens
    assert tokens(with_prefix.encode("a</s>a b")) == ["<s>", SPACE + "a", "</s>", SPACE + "a", SPACE, "b"]
    assert with_prefix.decode(with_prefix.encode("a b")) == "a b"
    assert with_prefix.decode(with_prefix.encode("  a")) == "  a"
    without = build(spm_metadata(pieces, add_space_prefix=False))
    assert tokens(without.encode("a</s>a b")) == ["<s>", "a", "</s>", "a", SPACE, "b"]
    assert without.decode(without.encode(" a b")) == " a b"


def test_bos_is_added_as_the_metadata_says():
    pieces = {SPACE: -1.0, "a": -2.0}
    assert build(spm_metadata(pieces)).encode("a")[0] == 1
    assert build(spm_metadata(pieces, add_bos_token=False)).encode("a")[0] != 1
    both = build(spm_metadata(pieces, add_eos_token=True)).encode("a")
    assert (both[0], both[-1]) == (1, 2)
    special = {"<bos>": C}
    assert build(bpe_metadata([], pre="llama-bpe", special=special, bos_token_id=256)).encode("a")[0] == 256
    assert build(bpe_metadata([], pre="gpt-2", special=special, bos_token_id=256)).encode("a")[0] != 256
    assert (
        build(bpe_metadata([], pre="gpt-2", special=special, bos_token_id=256, add_bos_token=True)).encode("a")[0]
        == 256
    )
    assert len(build(bpe_metadata([], pre="llama-bpe")).encode("a")) == 1  # no BOS there is


def test_special_and_user_defined_tokens():
    metadata = spm_metadata(
        {SPACE: -1.0, "a": -2.0}, user=("<tool>", "  "), add_space_prefix=False, add_bos_token=False
    )
    tokenizer = build(metadata)
    tool, spaces = 261, 262
    assert tokenizer.encode("<tool>a  a") == [tool, 260, spaces, 260]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([1, tool, spaces, 260, 2]) == "<tool>  a"
    assert tokenizer.decode([1, 260], skip_special_tokens=False) == "<s>a"
    assert tokenizer.token_bytes(spaces) == b"  "
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_phi3_control_tokens_swallow_spaces():
    pieces = {SPACE: -1.0, "a": -2.0}
    phi = build(spm_metadata(pieces, add_space_prefix=False) | {"general.architecture": "phi3"})
    assert phi.hf.convert_ids_to_tokens(phi.encode("</s>  a")) == ["<s>", "</s>", "a"]
    other = build(spm_metadata(pieces, add_space_prefix=False))
    assert other.hf.convert_ids_to_tokens(other.encode("</s>  a")) == ["<s>", "</s>", SPACE, SPACE, "a"]


def cuts(pre: str, text: str) -> list[str]:
    """How a pre-tokenizer cuts, in the text's own letters."""
    backend = gguf_tokenizer(bpe_metadata([], pre=pre)).backend
    alphabet = byte_alphabet()
    return [bytes(alphabet[c] for c in piece).decode() for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I'll pay 1234  now\n\n", ["I", "'ll", " pay", " 1234", " ", " now", "\n\n"]),
        ("smollm", "pay 1234", ["pay", " ", "1", "2", "3", "4"]),
        ("default", "a==b 12345", ["a", "==", "b", " ", "123", "45"]),
        ("llama-bpe", "I'LL pay 12345!\n", ["I", "'LL", " pay", " ", "123", "45", "!\n"]),
        ("llama-bpe", "a\n \n b", ["a", "\n \n", " b"]),
        ("qwen2", "x=12 (y)", ["x", "=", "1", "2", " (", "y", ")"]),
        ("qwen35", "e\u0301a b", ["e\u0301a", " b"]),
        ("gpt-2", "e\u0301a b", ["e", "\u0301", "a", " b"]),
        ("tekken", "helloWorld HTTPServer 12", ["hello", "World", " HTTPServer", " ", "1", "2"]),
        ("gpt-4o", "They'll sayHi 1234", ["They'll", " say", "Hi", " ", "123", "4"]),
        ("falcon", "a.b 1234", ["a", ".", "b", " ", "123", "4"]),
        ("deepseek-llm", "Hi, 日本 12\n", ["Hi", ",", " ", "日本", " ", "12", "\n"]),
        ("deepseek-coder", "a(b) 12", ["a", "(", "b", ")", " ", "1", "2"]),
        ("deepseek-v3", "日本 1234 (x)", ["日本", " ", "123", "4", " (", "x", ")"]),
    ],
)
def test_pre_tokenizers_cut(pre, text, expected):
    assert cuts(pre, text) == expected


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_text(pre):
    text = "Hé llo,  World's\t12345 日本語 🙂\r\n\n don't<|x|> ½ a_b-c"
    tokenizer = build(bpe_metadata([("h", "e")], pre=pre))
    assert "".join(cuts(pre, text)) == text
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_qwen_composes_characters_first():
    composed, apart = "\u00e9", "e\u0301"
    tokenizer = build(bpe_metadata([], pre="qwen2"))
    assert tokenizer.encode(apart) == tokenizer.encode(composed)
    plain = build(bpe_metadata([], pre="gpt-2"))
    assert plain.encode(apart) != plain.encode(composed)


def test_merges_and_their_order():
    tokenizer = build(bpe_metadata([("a", "b"), ("b", "c"), ("ab", "c")], pre="gpt-2"))
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("abcbc")] == [b"abc", b"bc"]


def test_ignore_merges_takes_whole_words():
    """Llama 3 knows words that its merges cannot reach."""
    words = [("a", "b")]
    metadata = bpe_metadata(words, pre="llama-bpe")
    metadata["tokenizer.ggml.tokens"] += ["xyz"]
    metadata["tokenizer.ggml.token_type"] += [int(N)]
    assert build(metadata).encode("xyz") == [257]
    assert len(build(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("xyz")) == 3


def test_user_defined_tokens_of_a_byte_level_vocabulary_are_text():
    tokenizer = build(bpe_metadata([], pre="gpt-2", special={"<é x>": D, "<|end|>": C}))
    assert tokenizer.encode("a<é x><|end|>")[1:] == [256, 257]
    assert tokenizer.token_bytes(256) == "<é x>".encode()
    assert tokenizer.decode([256, 257]) == "<é x>"


def test_repeated_and_empty_tokens_keep_their_ids():
    metadata = bpe_metadata([], pre="gpt-2")
    metadata["tokenizer.ggml.tokens"] += ["", "a", "<|end|>"]
    metadata["tokenizer.ggml.token_type"] += [int(TokenType.UNUSED), int(TokenType.UNUSED), int(C)]
    tokenizer = build(metadata)
    assert tokenizer.vocab_size == 259
    assert tokenizer.encode("a<|end|>")[-1] == 258


def test_chat_template_comes_along():
    metadata = bpe_metadata([], pre="gpt-2") | {"tokenizer.chat_template": "{{ messages[0].content }}"}
    assert build(metadata).chat_template == "{{ messages[0].content }}"
    assert build(bpe_metadata([], pre="gpt-2")).chat_template is None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, UnsupportedError, "'t5'"),
        ({"tokenizer.ggml.pre": "klingon"}, UnsupportedError, "'klingon'.*known: .*smollm"),
        ({"tokenizer.ggml.tokens": []}, ModelError, "holds no tokenizer"),
        ({"tokenizer.ggml.token_type": [1, 1]}, ModelError, "token_type has 2 entries for 256"),
        ({"tokenizer.ggml.bos_token_id": 999}, ModelError, "bos_token_id=999"),
        ({"tokenizer.ggml.merges": ["q q"]}, ModelError, "merges do not fit"),
    ],
)
def test_metadata_that_cannot_be_used(changes, error, message):
    with pytest.raises(error, match=message):
        gguf_tokenizer(bpe_metadata([], pre="gpt-2") | changes)
