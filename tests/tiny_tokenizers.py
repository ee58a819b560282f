"""Two small tokenizers with known ids, for tests of text: a byte-level BPE and a SentencePiece-style one."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class TinyTokenizer:
    """The methods of `jaxpaged.text.tokenizer.Tokenizer`, over a tokenizer built in memory."""

    def __init__(self, hf: PreTrainedTokenizerFast, *, byte_level: bool, chat_template: str | None = None):
        self.hf, self.chat_template, self._byte_level = hf, chat_template, byte_level
        self.vocab_size = len(hf)
        self.bos_token_id, self.eos_token_id = hf.bos_token_id, hf.eos_token_id
        self.special_ids = frozenset(hf.all_special_ids)
        self._bytes = byte_alphabet()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.hf.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self.hf.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.hf.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if token_id in self.special_ids:
            return piece.encode()
        if self._byte_level:
            return bytes(self._bytes[c] for c in piece)
        if piece.startswith("<0x"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode()

    def id(self, piece: str) -> int:
        """The id of a piece as the vocabulary spells it."""
        found = self.hf.convert_tokens_to_ids(piece)
        assert found != self.hf.unk_token_id, piece
        return found

    def ids(self, *pieces: str) -> list[int]:
        return [self.id(p) for p in pieces]

    def byte_ids(self, text: str | bytes) -> list[int]:
        """A token a byte."""
        raw = text.encode() if isinstance(text, str) else text
        if self._byte_level:
            char = {byte: c for c, byte in self._bytes.items()}
            return [self.id(char[b]) for b in raw]
        return [self.id(f"<0x{b:02X}>") for b in raw]


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE (the table of GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


WORDS = ["DEF", "G", "HI", "J", "Ġquick", "Ġbr", "own", "Ġfox", "Ġdog", "Ġha", "The", "Hello", "Ġworld", "aab", "ab"]


def byte_level(chat_template: str | None = CHATML, words: list[str] = WORDS) -> TinyTokenizer:
    """Ids 0..2 are <|endoftext|>, <|im_start|> (BOS), <|im_end|> (EOS); then 256 bytes, then `words`; no merges."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    pieces = specials + sorted(byte_alphabet()) + [w for w in words if len(w) > 1]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    hf = _fast(tokenizer, specials, unk="<|endoftext|>", bos="<|im_start|>", eos="<|im_end|>")
    return TinyTokenizer(hf, byte_level=True, chat_template=chat_template)


def sentencepiece(chat_template: str | None = None) -> TinyTokenizer:
    """Ids 0..2 are <unk>, <s>, </s>; then 256 byte tokens; then letters and some words. As Llama 2's, but small."""
    specials = ["<unk>", "<s>", "</s>"]
    letters = [chr(c) for c in range(33, 127)] + ["▁"]
    words = ["▁Hello", "▁world", "▁!", "▁a", "▁x", "wor", "ld"]
    pieces = specials + [f"<0x{b:02X}>" for b in range(256)] + letters + words
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    hf = _fast(tokenizer, specials, unk="<unk>", bos="<s>", eos="</s>")
    return TinyTokenizer(hf, byte_level=False, chat_template=chat_template)


def _fast(tokenizer: Tokenizer, specials: list[str], *, unk: str, bos: str, eos: str) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unk, bos_token=bos, eos_token=eos)
