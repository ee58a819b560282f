"""Text to token ids and back: one face for Hugging Face tokenizers and those inside GGUF files.

Decoding joins the bytes of the tokens, so the text of a sequence never depends on how it is cut into pieces, and
needs no lock.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

from jaxpaged.checkpoint.source import ModelSource, open_model
from jaxpaged.errors import InvalidRequestError, ModelError, RequestTooLargeError, UnsupportedError
from jaxpaged.text.gguf_tokenizer import SPACE, GGUFTokenizer, gguf_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Importing transformers takes a second, and only chat templates and Hugging Face folders need it.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would tell that PyTorch was not found

_CUT_CHARS_PER_TOKEN, _CUT_CHARS = 64, 1 << 16  # of text that is cut to the context: some, and in any case
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A model's tokenizer; safe to use from many threads.

    Attributes:
      added_tokens: texts of tokens that were added to the vocabulary, by id: control tokens, as a rule.
    """

    def __init__(self, described: PreTrainedTokenizerFast | GGUFTokenizer):
        self._described = described
        if isinstance(described, GGUFTokenizer):
            self._backend = described.backend
            ids = {name: self._backend.token_to_id(token) for name, token in described.special.items() if token}
            named = {i for i in ids.values() if i is not None}
            bos, eos = ids.get("bos_token"), ids.get("eos_token")
        else:
            # A copy of our own: transformers changes the state of its backend (truncation, padding) from call to call,
            # and a change during another thread's encode is an error ("Already borrowed").
            self._backend = Backend.from_str(described.backend_tokenizer.to_str())
            self._backend.no_truncation()
            self._backend.no_padding()
            named, bos, eos = set(described.all_special_ids), described.bos_token_id, described.eos_token_id
        added = self._backend.get_added_tokens_decoder()
        self.added_tokens: dict[int, str] = {i: token.content for i, token in added.items()}
        self.special_ids: frozenset[int] = frozenset(i for i, t in added.items() if t.special) | named
        self.bos_token_id: int | None = _single_id(bos)
        self.eos_token_id: int | None = _single_id(eos)
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._kind = _kind(self._backend)
        self._texts: dict[int, tuple[str, bytes]] = {}  # of tokens that were asked for

    @classmethod
    def from_source(cls, source: ModelSource) -> Tokenizer:
        """The tokenizer that came with a model.

        Raises:
          ModelError: there is none, it is damaged, or it needs code of its own.
          UnsupportedError: a GGUF tokenizer of an unknown kind.
        """
        if source.gguf is not None:
            return cls(gguf_tokenizer(source.gguf.metadata))
        return cls.from_folder(source.path)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a local folder; code in the folder is not run."""
        try:
            from transformers import AutoTokenizer, PreTrainedTokenizerFast

            hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # many classes, depending on what is wrong with the files
            raise ModelError(f"{folder} has no usable tokenizer: {_first_line(error)}") from error
        if not isinstance(hf, PreTrainedTokenizerFast):
            raise UnsupportedError(f"{folder}: {type(hf).__name__} is not a fast tokenizer (it has no tokenizer.json)")
        return cls(hf)

    @classmethod
    def from_name(cls, name: str) -> Tokenizer:
        """The tokenizer of a model by any name that `open_model` takes; its weights are not read."""
        path = Path(os.path.expanduser(name))
        if path.is_dir() and (path / "tokenizer_config.json").is_file():
            return cls.from_folder(path)
        return cls.from_source(open_model(name, load_format="dummy"))

    @functools.cached_property
    def hf(self) -> PreTrainedTokenizerFast:
        """The tokenizer of transformers, for chat templates. It is not thread-safe where it truncates or pads."""
        described = self._described
        return described.to_transformers() if isinstance(described, GGUFTokenizer) else described

    @property
    def chat_templates(self) -> str | dict[str, str] | None:
        """The model's template, or several by name."""
        return self._described.chat_template

    @property
    def chat_template(self) -> str | None:
        """The model's default template."""
        templates = self.chat_templates
        return templates.get("default") if isinstance(templates, dict) else templates

    def use_chat_template(self, template: str) -> None:
        """Replaces the model's templates."""
        self._described.chat_template = template

    def piece(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None if there is none of that id."""
        return self._backend.id_to_token(token_id)

    def check_length(self, text: str, max_tokens: int, *, cut: bool = False) -> None:
        """Refuses text that must have more than `max_tokens` tokens by its length alone, before any time goes into it.

        Args:
          cut: only its last tokens are wanted, so it may be longer; but it is all tokenized, so not by any length.

        Raises:
          RequestTooLargeError: it has more characters than that many of the longest tokens.
        """
        most = max_tokens * self._longest_piece
        if cut:
            most = max(most, max_tokens * _CUT_CHARS_PER_TOKEN, _CUT_CHARS)
            if len(text) > most:
                raise RequestTooLargeError(
                    f"the text has {len(text)} characters; to be cut to tokens it may have {most}", param="prompt"
                )
        if len(text) > most:
            raise RequestTooLargeError(
                f"the text of {len(text)} characters cannot fit a context of {max_tokens} tokens", param="prompt"
            )

    @functools.cached_property
    def _longest_piece(self) -> int:
        return max((len(piece) for piece in self._backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Control tokens in the text become their ids.

        Args:
          add_special_tokens: add what the model's tokenizer adds, usually BOS: as its tokenizer.json says, or the
            metadata of a GGUF file. A text that begins with BOS already (a rendered chat prompt) gets no second one.

        Raises:
          InvalidRequestError: not text, or text with lone surrogates, which no tokenizer can take.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"text to encode must be a string, not {type(text).__name__}")
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError(f"the text is not valid Unicode: {error}") from error
        if add_special_tokens and self._adds_bos and ids[1:2] == [self.bos_token_id]:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that make no character become U+FFFD. Spaces are never cleaned up.

        Raises:
          InvalidRequestError: an id outside the vocabulary.
        """
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special_ids]
        if self._kind is None:
            return self._backend.decode(list(ids), skip_special_tokens=False)
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._kind.strips_first_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text, as raw bytes: b" the", b"\\xf0"; for special tokens their name.

        Raises:
          InvalidRequestError: the id is outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token's text, where what is no character is U+FFFD, and its bytes; errors as `token_bytes`."""
        found = self._texts.get(token_id)
        if found is None:
            raw = self.token_bytes(token_id)
            found = self._texts[token_id] = raw.decode("utf-8", "replace"), raw
        return found

    @functools.cached_property
    def _adds_bos(self) -> bool:
        return self.bos_token_id is not None and self._backend.encode("").ids[:1] == [self.bos_token_id]

    @functools.cached_property
    def _bytes(self) -> list[bytes]:
        """Bytes of every token; an id that no token has adds nothing."""
        if self._kind is None:
            raise UnsupportedError(f"bytes of single tokens are not known for the decoder {self._backend.decoder!r}")
        pieces = [self._backend.id_to_token(i) for i in range(self.vocab_size)]
        table = [self._kind.piece_bytes(piece) if piece is not None else b"" for piece in pieces]
        for i, content in self.added_tokens.items():
            plain = i in self.special_ids or self._kind.byte_level
            table[i] = (content if plain else content.replace(SPACE, " ")).encode("utf-8")
        return table


@dataclass(frozen=True)
class _Kind:
    """How the pieces of a vocabulary stand for bytes.

    Attributes:
      byte_level: each character of a piece is one byte, in GPT-2's alphabet; else pieces are text, with SPACE for a
        space and `<0x0A>` for a byte.
      strips_first_space: the encoder put a space before the text, so one is taken off the decoded text.
    """

    byte_level: bool
    strips_first_space: bool = False

    def piece_bytes(self, piece: str) -> bytes:
        if self.byte_level:
            alphabet = _byte_alphabet()
            if all(char in alphabet for char in piece):
                return bytes(alphabet[char] for char in piece)
            return piece.encode("utf-8")
        byte = _BYTE_PIECE.fullmatch(piece)
        return bytes.fromhex(byte[1]) if byte else piece.replace(SPACE, " ").encode("utf-8")


def _kind(backend: Backend) -> _Kind | None:
    """Read from the decoder; None if it is neither byte-level nor SentencePiece-like."""
    steps = list(_steps(json.loads(backend.decoder.__getstate__()))) if backend.decoder is not None else []
    types = {step["type"] for step in steps}
    if types == {"ByteLevel"}:
        return _Kind(byte_level=True)
    if not types or types - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    for step in steps:
        replaces_space = step["type"] == "Replace" and step["pattern"] == {"String": SPACE} and step["content"] == " "
        if step["type"] == "Replace" and not replaces_space:
            return None
    strips = any(
        (step["type"] == "Strip" and step["content"] == " " and step["start"] == 1)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    return _Kind(byte_level=False, strips_first_space=strips)


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the rest for what follows U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _single_id(value: Any) -> int | None:
    """transformers types its special ids loosely; with a token set, they are integers."""
    return value if isinstance(value, int) else None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
