"""Log-probabilities as callers see them: each token with its text, its bytes and its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import TokenLogprobs
from jaxpaged.engine.output import PositionLogprobs, TokenLogprob
from jaxpaged.text.detokenizer import prompt_text

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

SLICE_TOKENS = 8192  # that are described at a time: a few milliseconds


class Describer:
    """Adds texts to log-probabilities. Without a tokenizer they are empty."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer
        self._text = _no_text if tokenizer is None else tokenizer.token_text

    def position(self, raw: TokenLogprobs, text_offset: int) -> PositionLogprobs:
        """Args: text_offset: where the token's text starts."""
        text = self._text
        ranks = range(1, len(raw.top_ids) + 1) if raw.top_ranks is None else raw.top_ranks
        rivals = zip(raw.top_ids, raw.top_logprobs, ranks, strict=True)
        top = tuple([TokenLogprob(i, logprob, rank, *text(i)) for i, logprob, rank in rivals])
        return PositionLogprobs(raw.token_id, raw.logprob, raw.rank, *text(raw.token_id), top, text_offset)


class PromptDescription:
    """The log-probabilities of a prompt: they come in pieces, and a long one is described in slices.

    Attributes:
      positions: as in `RequestOutput.prompt_logprobs`, as far as described.
    """

    def __init__(
        self,
        token_ids: list[int],
        prompt: str | None,
        params: SamplingParams,
        describer: Describer,
        offsets: list[int] | None,
    ):
        """Args: offsets: where each token starts in the prompt's text; None: to be found out."""
        self.positions: list[PositionLogprobs | None] = [None]
        self._token_ids, self._prompt, self._params, self._describer = token_ids, prompt, params, describer
        self._offsets = offsets
        self._raw: list[TokenLogprobs] = []

    @property
    def is_behind(self) -> bool:
        """Whether something that has come is not described."""
        return len(self.positions) <= len(self._raw)

    @property
    def is_complete(self) -> bool:
        return len(self.positions) == len(self._token_ids)

    def add(self, records: list[TokenLogprobs]) -> None:
        """Takes in those of the next positions."""
        self._raw += records

    def describe(self, num_tokens: int = SLICE_TOKENS) -> None:
        """Describes positions until these have `num_tokens` tokens, one at least."""
        if self._offsets is None:
            self._offsets = self._find_offsets()
        while self.is_behind and num_tokens > 0:
            at = len(self.positions)
            position = self._describer.position(self._raw[at - 1], self._offsets[at])
            self.positions.append(position)
            num_tokens -= 1 + len(position.top)

    def _find_offsets(self) -> list[int]:
        tokenizer = self._describer.tokenizer
        if tokenizer is None:
            return [0] * len(self._token_ids)
        return prompt_text(tokenizer, self._token_ids, self._prompt, self._params)[1]


def _no_text(_: int) -> tuple[str, bytes]:
    return "", b""
