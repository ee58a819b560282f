"""A fast tokenizer from a GGUF file's metadata.

GGUF names how text is split before merging (`tokenizer.ggml.pre`) and llama.cpp knows each name's regular expressions;
the same expressions stand here. Of vocabularies there are two kinds: byte-level BPE ("gpt2"), with its merges; and
SentencePiece ("llama"), with a score for each piece, which is BPE too: of all neighbours that make a piece, the
pair whose piece has the highest score is merged first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxpaged.errors import ModelError, UnsupportedError
from jaxpaged.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"  # how SentencePiece writes a space


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class GGUFTokenizer:
    """What a GGUF file says of its tokenizer.

    Attributes:
      backend: with all its tokens, which adds BOS and EOS as the file says.
      special: "bos_token", "eos_token", "unk_token" and "pad_token"; None: there is none.
      adds: "add_bos_token" and "add_eos_token".
      chat_template: None: there is none.
    """

    backend: Tokenizer
    special: dict[str, str | None]
    adds: dict[str, bool]
    chat_template: str | None

    def to_transformers(self) -> PreTrainedTokenizerFast:
        """The same for transformers, which is imported now: that takes a second."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(self.backend.to_str()),
            chat_template=self.chat_template,
            clean_up_tokenization_spaces=False,
            **self.adds,
            **self.special,
        )


def gguf_tokenizer(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """The tokenizer that a GGUF file describes, chat template included.

    Raises:
      ModelError: the metadata lacks a vocabulary or contradicts itself.
      UnsupportedError: a tokenizer model or pre-tokenizer that is not known here.
    """
    vocabulary = _Vocabulary(metadata)
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        pre = _pre_tokenizer(metadata)
        tokenizer, add_bos = _byte_level(vocabulary, pre), pre.add_bos
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(vocabulary), True
    else:
        raise UnsupportedError(f"tokenizer.ggml.model={model!r} is not supported; known: 'gpt2', 'llama'")
    _add_special_tokens(
        tokenizer, vocabulary, rstrip=metadata.get("general.architecture") == "phi3" and model == "llama"
    )
    special = {name: vocabulary.special(key) for name, key in _SPECIAL.items()}
    adds = {
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
        and special["bos_token"] is not None,
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and special["eos_token"] is not None,
    }
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    named = [token for token in special.values() if token is not None and token not in known]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named])
    tokenizer.post_processor = _ends(tokenizer, special, **adds)
    return GGUFTokenizer(tokenizer, special, adds, metadata.get("tokenizer.chat_template"))


def _ends(
    tokenizer: Tokenizer, special: Mapping[str, str | None], *, add_bos_token: bool, add_eos_token: bool
) -> processors.TemplateProcessing:
    """Puts BOS before each text and EOS after it, where it is added."""
    bos, eos = special["bos_token"] if add_bos_token else None, special["eos_token"] if add_eos_token else None

    def around(text: str, part: int) -> str:
        return " ".join(f"{piece}:{part}" for piece in (bos, text, eos) if piece is not None)

    ids = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None]
    return processors.TemplateProcessing(
        single=around("$A", 0), pair=f"{around('$A', 0)} {around('$B', 1)}", special_tokens=ids
    )


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class _Vocabulary:
    """Tokens, their types and scores, checked."""

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata
        tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens") or ()
        if not tokens:
            raise ModelError("the GGUF file holds no tokenizer: tokenizer.ggml.tokens is missing")
        self.tokens = _distinct(tokens)
        self.types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
        self.scores: Sequence[float] = metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
        self.merges: Sequence[str] = metadata.get("tokenizer.ggml.merges") or ()
        self.add_space_prefix: bool | None = metadata.get("tokenizer.ggml.add_space_prefix")
        for name, values in (("token_type", self.types), ("scores", self.scores)):
            if len(values) < len(tokens):
                raise ModelError(f"tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} tokens")

    @property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    def special(self, key: str) -> str | None:
        """The token whose id the metadata gives for `key`: "bos", "unknown"."""
        token_id = self._metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise ModelError(f"tokenizer.ggml.{key}_token_id={token_id} is outside the {len(self.tokens)} tokens")
        return self.tokens[token_id]


def _distinct(tokens: Sequence[str]) -> list[str]:
    """Empty tokens and repetitions get a name of their own, so that every id keeps a token."""
    seen: set[str] = set()
    result = []
    for i, token in enumerate(tokens):
        if not token or token in seen:
            token = f"[UNUSED_{i}]"
        seen.add(token)
        result.append(token)
    return result


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"tokenizer.ggml.pre={name!r} is not supported; known: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(vocabulary: _Vocabulary, pre: PreTokenizer) -> Tokenizer:
    merges = []
    for merge in vocabulary.merges:
        left, _, right = merge[1:].partition(" ")  # a space may be the first character, never a later one
        merges.append((merge[:1] + left, right))
    try:
        model = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the tokenizers library raises no class of its own
        raise ModelError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error
    tokenizer = Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, as_bytes])
    before: list[normalizers.Normalizer] = [normalizers.NFC()] if pre.nfc else []
    if vocabulary.add_space_prefix:
        before.append(normalizers.Prepend(" "))
    if before:
        tokenizer.normalizer = normalizers.Sequence(before)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    unknown = vocabulary.special("unknown")
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=_merges_from_scores(vocabulary),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    escape = normalizers.Replace(" ", SPACE)
    unescape = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix is False:
        tokenizer.normalizer = escape
        tokenizer.decoder = decoders.Sequence(unescape)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape])
        tokenizer.decoder = decoders.Sequence([*unescape, decoders.Strip(" ", 1, 0)])
    return tokenizer


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces is a merge; pieces of higher score come first."""
    pieces = [
        (-score, i, token)
        for i, (token, kind, score) in enumerate(
            zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=False)
        )
        if kind == TokenType.NORMAL
    ]
    known = {token for _, _, token in pieces}
    merges = []
    for _, _, token in sorted(pieces):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                merges.append((left, right))
    return merges


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary, *, rstrip: bool) -> None:
    """Tokens that are found in the text before anything else cuts it.

    Args:
      rstrip: control tokens swallow the spaces after them, as Phi-3's do.
    """
    added = []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=False):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            strips = rstrip and token not in ("<unk>", "<s>", "<|endoftext|>")
            added.append(AddedToken(token, special=True, normalized=False, rstrip=strips))
        elif kind == TokenType.USER_DEFINED:
            added.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_tokens(added)
