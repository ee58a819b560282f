"""Tokenizers of folders and of the demo: the same text by every path, BOS once, many threads."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jaxpaged.checkpoint.source import open_model
from jaxpaged.errors import InvalidRequestError, ModelError, UnsupportedError
from jaxpaged.text.tokenizer import Tokenizer
from tests.tiny_tokenizers import byte_alphabet

TEXTS = [
    "Hello world",
    "  leading and trailing  ",
    "a\n\n\n b\t\tc   d    e\r\n",
    "don't DON'T it's I'LL we'd",
    "1234567890 12 3 4,567.89 x1y2z3",
    "def f(x):\n    return x**2  # comment\n\n\nclass A:\n\tpass",
    "日本語テキスト 中文 한국어 العربية עברית हिन्दी",
    "🙂👩‍👩‍👧‍👦🇫🇷 emoji🙂",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "e\u0301 \u00e9 \u200b\ufeff ½ ² ٣ ⅷ",
    "",
    " ",
    "\n",
    "\x00\x01\x7f",
]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_source(open_model("demo"))


def write_tokenizer(folder, *, kind="byte", **config):
    """A folder with a tokenizer of Llama 3's or Llama 2's make."""
    folder.mkdir(exist_ok=True)
    if kind == "byte":
        specials = ["<bos>", "<eos>"]
        vocab = {piece: i for i, piece in enumerate([*specials, *sorted(byte_alphabet()), "ab"])}
        backend = Backend(models.BPE(vocab=vocab, merges=[("a", "b")]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        specials = ["<unk>", "<bos>", "<eos>"]
        pieces = [*specials, *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a"]
        vocab = {piece: i for i, piece in enumerate(pieces)}
        backend = Backend(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
        if kind == "metaspace":
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
            unescape = [
                decoders.Metaspace(prepend_scheme="first", split=False),
                decoders.ByteFallback(),
                decoders.Fuse(),
            ]
        else:
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            unescape = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(unescape)
    backend.add_special_tokens([AddedToken(s, normalized=False) for s in specials])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", **config})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def test_demo_facts(demo):
    assert demo.vocab_size == 49152
    assert (demo.bos_token_id, demo.eos_token_id) == (1, 2)
    assert demo.special_ids == set(range(17))
    assert demo.token_bytes(2) == b"<|im_end|>"
    assert "<|im_start|>" in demo.chat_template
    assert demo.encode("Hello world") == [19556, 905]  # no BOS: add_bos_token is false
    assert [demo.token_bytes(i) for i in demo.encode("pay 42 €")] == [b"pay", b" ", b"4", b"2", b" \xe2\x82\xac"]


@pytest.mark.parametrize("text", TEXTS)
def test_demo_gives_every_text_back_by_every_path(demo, text):
    ids = demo.encode(text)
    assert demo.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(demo.token_bytes, ids)) == text.encode()
    assert demo.hf.decode(ids) == text
    assert demo.decode(ids) == demo.hf.decode(ids, skip_special_tokens=True)


def test_demo_decodes_any_ids_as_transformers_does(demo):
    rng = random.Random(0)
    for _ in range(500):
        ids = [rng.randrange(demo.vocab_size) for _ in range(rng.randrange(1, 12))]
        assert demo.decode(ids, skip_special_tokens=False) == demo.hf.decode(ids)
        assert demo.decode(ids) == demo.hf.decode(ids, skip_special_tokens=True)


def test_control_tokens_in_text_are_control_tokens(demo):
    assert demo.encode("<|im_start|>user") == [1, 4093]
    assert demo.decode([1, 4093]) == "user"


def test_spaces_are_never_cleaned_up(tmp_path):
    tokenizer = Tokenizer.from_folder(write_tokenizer(tmp_path / "t", clean_up_tokenization_spaces=True))
    text = "a , b . don 't"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["byte", "sentencepiece", "metaspace"])
def test_folder(tmp_path, kind):
    tokenizer = Tokenizer.from_source(open_model(write_tokenizer(tmp_path / "t", kind=kind), load_format="dummy"))
    bos, eos = tokenizer.hf.convert_tokens_to_ids(["<bos>", "<eos>"])
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (bos, eos)
    assert {bos, eos} <= tokenizer.special_ids
    for text in ("ab a", " a  b", "🙂 é", "a<tool>", ""):
        if kind == "metaspace":
            text = text.lstrip()  # it takes a leading space for the one that it would add
        ids = tokenizer.encode(text)
        assert ids[:1] == [bos]
        assert tokenizer.decode(ids) == tokenizer.hf.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids) == text
        joined = b"".join(tokenizer.token_bytes(i) for i in ids if i not in tokenizer.special_ids).decode()
        assert joined.removeprefix(" " if kind != "byte" else "") == text
        assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]


# B24
@pytest.mark.parametrize("kind", ["byte", "sentencepiece"])
def test_bos_is_never_doubled(tmp_path, kind):
    tokenizer = Tokenizer.from_folder(write_tokenizer(tmp_path / "t", kind=kind))
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("ab").count(bos) == 1
    assert tokenizer.encode("<bos>ab") == [bos, *tokenizer.encode("<bos>ab", add_special_tokens=False)[1:]]
    assert tokenizer.encode("<bos>ab").count(bos) == 1
    assert tokenizer.encode("<bos>ab", add_special_tokens=False).count(bos) == 1
    assert tokenizer.encode("ab<bos>").count(bos) == 2


@pytest.mark.parametrize("said", [True, False])
def test_tokenizer_json_decides_about_bos(tmp_path, said):
    """As in transformers: `add_bos_token` of the config counts only where there is no tokenizer.json."""
    folder = write_tokenizer(tmp_path / "t", add_bos_token=said)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("ab") == tokenizer.hf.encode("ab") == [tokenizer.bos_token_id, 258]
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {"post_processor": None}))
    without = Tokenizer.from_folder(folder)
    assert without.encode("ab") == without.hf.encode("ab") == [258]
    assert without.encode("<bos><bos>ab").count(without.bos_token_id) == 2  # none was added, none is taken away


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path):
    folder = write_tokenizer(tmp_path / "t")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8, pad_token="<eos>", pad_id=1)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("b" * 100)) == "b" * 100
    tokenizer.hf("bbbbbbbb", truncation=True, max_length=2)
    assert tokenizer.decode(tokenizer.encode("b" * 100)) == "b" * 100


def test_named_templates_give_the_default(tmp_path):
    named = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    assert Tokenizer.from_folder(write_tokenizer(tmp_path / "t", chat_template=named)).chat_template == "D"


def test_ids_outside_the_vocabulary(demo):
    for wrong in (49152, -1, 2**40):
        with pytest.raises(InvalidRequestError, match=str(wrong)):
            demo.token_bytes(wrong)
        with pytest.raises(InvalidRequestError, match=str(wrong)):
            demo.decode([5, wrong])


def test_what_is_no_text(demo):
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        demo.encode("a\ud800b")
    with pytest.raises(InvalidRequestError, match="must be a string, not bytes"):
        demo.encode(b"abc")  # type: ignore[arg-type]


def test_folders_without_a_usable_tokenizer(tmp_path):
    with pytest.raises(ModelError, match="no usable tokenizer"):
        Tokenizer.from_folder(tmp_path)
    folder = write_tokenizer(tmp_path / "t")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="no usable tokenizer"):
        Tokenizer.from_folder(folder)


def test_other_kinds_decode_but_have_no_bytes(tmp_path):
    folder = write_tokenizer(tmp_path / "t")
    backend = Backend(models.WordPiece(vocab={"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode([1, 2]) == "playing"
    with pytest.raises(UnsupportedError, match="WordPiece"):
        tokenizer.token_bytes(1)


def test_names(tmp_path, demo):
    folder = write_tokenizer(tmp_path / "t")
    assert Tokenizer.from_name(str(folder)).vocab_size == 260
    (folder / "config.json").unlink()  # a tokenizer alone will do
    assert Tokenizer.from_name(str(folder)).vocab_size == 260
    assert Tokenizer.from_name("demo").encode("Hello world") == demo.encode("Hello world")


# B28
def test_sixteen_threads(demo):
    """Encoding and decoding beside a thread that truncates through transformers: no "Already borrowed"."""
    rng = random.Random(1)
    texts = ["".join(rng.choices(TEXTS, k=rng.randrange(1, 40))) for _ in range(16)]
    expected = [demo.encode(text) for text in texts]
    fresh = Tokenizer(demo.hf)  # its tables are built by all threads at once

    def work(worker: int) -> int:
        for i in range(30):
            k = (worker + i) % len(texts)
            if worker == 0:
                demo.hf(texts[k], truncation=True, max_length=4)
                continue
            assert fresh.encode(texts[k]) == expected[k]
            assert fresh.decode(expected[k], skip_special_tokens=False) == texts[k]
        return worker

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(16))) == list(range(16))
