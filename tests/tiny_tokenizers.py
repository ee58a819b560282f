"""Two small tokenizers with known ids, for tests of text: a byte-level BPE and a SentencePiece-style one."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jaxpaged.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class TinyTokenizer(Tokenizer):
    """A tokenizer built in memory, with ways to name its tokens. `hf` may be another one's: it is left as it is."""

    def __init__(self, hf: PreTrainedTokenizerFast, *, byte_level: bool):
        super().__init__(hf)
        self._byte_level = byte_level

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
            char = {byte: c for c, byte in byte_alphabet().items()}
            return [self.id(char[b]) for b in raw]
        return [self.id(f"<0x{b:02X}>") for b in raw]


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE (the table of GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


WORDS = ["DEF", "G", "HI", "J", "Ġquick", "Ġbr", "own", "Ġfox", "Ġdog", "Ġha", "The", "Hello", "Ġworld", "aab", "ab"]


def byte_level(
    chat_template: str | None = CHATML, words: list[str] = WORDS, alphabet: list[str] | None = None
) -> TinyTokenizer:
    """Ids 0..2 are <|endoftext|>, <|im_start|> (BOS), <|im_end|> (EOS); then 256 bytes, then `words`; no merges.

    Args:
      alphabet: these bytes only, for a vocabulary that is smaller still.
    """
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    pieces = specials + sorted(alphabet or byte_alphabet()) + [w for w in words if len(w) > 1]
    tokenizer = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    hf = _fast(tokenizer, specials, chat_template, unk="<|endoftext|>", bos="<|im_start|>", eos="<|im_end|>")
    return TinyTokenizer(hf, byte_level=True)


def sentencepiece(chat_template: str | None = None) -> TinyTokenizer:
    """Ids 0..2 are <unk>, <s>, </s>; then 256 byte tokens; then letters and some words. As Llama 2's, but small."""
    specials = ["<unk>", "<s>", "</s>"]
    letters = [chr(c) for c in range(33, 127)] + ["▁"]
    words = ["▁Hello", "▁world", "▁!", "▁a", "▁x", "wor", "ld"]
    pieces = specials + [f"<0x{b:02X}>" for b in range(256)] + letters + words
    tokenizer = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    hf = _fast(tokenizer, specials, chat_template, unk="<unk>", bos="<s>", eos="</s>")
    return TinyTokenizer(hf, byte_level=False)


def _fast(
    tokenizer: Backend, specials: list[str], chat_template: str | None, *, unk: str, bos: str, eos: str
) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unk, bos_token=bos, eos_token=eos)
    hf.chat_template = chat_template
    return hf
