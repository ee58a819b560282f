"""Log-probabilities as JSON, in the forms of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxpaged.engine.output import PositionLogprobs, TokenLogprob

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no -inf


class LogprobFormat:
    """How a request wants its logprobs.

    A token whose bytes are no characters is named after its bytes ("bytes:\\xf0\\x9f"), and names that two tokens of
    one position share are told apart by id, so that no entry of an object keyed by name is lost.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool, hidden_ids: frozenset[int]):
        """
        Args:
          as_ids: name every token "token_id:123".
          hidden_ids: tokens that never become text: they are named, but have no bytes.
        """
        self._tokenizer, self._as_ids, self._hidden_ids = tokenizer, as_ids, hidden_ids

    def chat(self, positions: Sequence[PositionLogprobs], *, last_is_hidden: bool) -> dict[str, Any]:
        """The object of /v1/chat/completions.

        The bytes of the sampled tokens join to the text. So a token that is no part of it has none.

        Args:
          last_is_hidden: the last position is the token that ended the text.
        """
        content = [{**self._chat_entry(p), "top_logprobs": [self._chat_entry(t) for t in p.top]} for p in positions]
        if last_is_hidden and content:
            content[-1]["bytes"] = []
        return {"content": content, "refusal": None}

    def completion(
        self, positions: Sequence[PositionLogprobs], *, with_top: bool, start: int = 0
    ) -> dict[str, list[Any] | None]:
        """The object of /v1/completions.

        Args:
          with_top: give the rivals too.
          start: where the text of these positions starts in the text that is returned.
        """
        return {
            "text_offset": [start + p.text_offset for p in positions],
            "token_logprobs": [_finite(p.logprob) for p in positions],
            "tokens": [self._name(p.token_id, p.bytes) for p in positions],
            "top_logprobs": [self._top(p, p.top) for p in positions] if with_top else None,
        }

    def echoed(
        self,
        token_ids: Sequence[int],
        offsets: Sequence[int],
        positions: Sequence[PositionLogprobs | None],
        count: int,
        after: dict[str, list[Any] | None],
    ) -> dict[str, list[Any] | None]:
        """The object of /v1/completions for a prompt and what follows it.

        Args:
          token_ids, offsets: the prompt's tokens, and where in the text they start.
          positions: records of them, the first one None; or none at all, if the request ended before its prompt was
            scored: then null stands for each.
          count: how many of the likeliest tokens to give; -1: all.
          after: the object of the output.
        """
        positions = [*positions, *[None] * (len(token_ids) - len(positions))]
        rivals = [p and self._top(p, p.top if count < 0 else p.top[:count]) for p in positions]
        tops, names = after["top_logprobs"], [self._name(t, self._tokenizer.token_bytes(t)) for t in token_ids]
        return {
            "text_offset": [*offsets, *(after["text_offset"] or ())],
            "token_logprobs": [*(p and _finite(p.logprob) for p in positions), *(after["token_logprobs"] or ())],
            "tokens": [*names, *(after["tokens"] or ())],
            "top_logprobs": None if tops is None else [*rivals, *tops],
        }

    def prompt(self, positions: Sequence[PositionLogprobs | None], count: int) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token null, or id -> what is known of it; the prompt's own first.

        Args:
          count: how many of the likeliest tokens to give; -1: all.
        """
        return [
            p and {str(t.token_id): _described(t) for t in (p, *(p.top if count < 0 else p.top[:count]))}
            for p in positions
        ]

    def _chat_entry(self, token: TokenLogprob) -> dict[str, Any]:
        name = f"token_id:{token.token_id}" if self._as_ids else token.token
        raw = [] if token.token_id in self._hidden_ids else list(token.bytes)
        return {"token": name, "logprob": _finite(token.logprob), "bytes": raw}

    def _top(self, position: PositionLogprobs, rivals: Sequence[TokenLogprob]) -> dict[str, float]:
        """The rivals and the token itself."""
        entries: dict[str, float] = {}
        seen: set[int] = set()
        for token in (*rivals, position):
            if token.token_id not in seen:
                seen.add(token.token_id)
                name = self._name(token.token_id, token.bytes)
                entries[f"token_id:{token.token_id}" if name in entries else name] = _finite(token.logprob)
        return entries

    def _name(self, token_id: int, raw: bytes) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _described(token: TokenLogprob) -> dict[str, Any]:
    return {"logprob": _finite(token.logprob), "rank": token.rank, "decoded_token": token.token}


def _finite(logprob: float) -> float:
    # `max` would keep a NaN, and JSON has none.
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
