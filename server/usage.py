"""Token counts of a request, from its outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.engine.output import RequestOutput


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request, which may hold several prompts; filled from deltas or from final outputs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    _seen: set[int] = field(default_factory=set)

    def add(self, index: int, output: RequestOutput) -> None:
        """Counts an output of the prompt with this index: the prompt once, and the tokens of all its samples."""
        if index not in self._seen:
            self._seen.add(index)
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)

    def to_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


def total_usage(outputs: Iterable[RequestOutput]) -> Usage:
    """Usage of finished outputs, one a prompt."""
    usage = Usage()
    for index, output in enumerate(outputs):
        usage.add(index, output)
    return usage
