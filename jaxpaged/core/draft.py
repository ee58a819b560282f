"""A step in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxpaged.core.request import Request
from jaxpaged.core.step import PooledRange, PromptRange, Step


@dataclass(slots=True)
class Chunk:
    """A row whose number of tokens is still open: part or rest of a prompt."""

    request: Request
    start: int
    num_tokens: int


@dataclass(slots=True)
class Draft:
    """A step whose rows of one token are final, and the chunks that will become its other rows.

    Attributes:
      budget: most tokens that it may have.
      is_searching: the search for a waiting prompt's prefix goes on in the next one.
    """

    budget: int
    step: Step = field(default_factory=Step)
    chunks: list[Chunk] = field(default_factory=list)
    is_searching: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows as they stand."""
        return len(self.step.requests) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def has_rows(self) -> bool:
        """Whether there is anything to launch."""
        return bool(self.step.requests or self.chunks)

    def complete(self, *, logprobs: bool, masks: bool, vectors: bool) -> Step:
        """Adds the chunks' rows, those that came down to one token first, and what a step says besides rows.

        Args:
          logprobs, masks, vectors: whether any live request may want them.
        """
        step = self.step
        self.chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
        for chunk in self.chunks:
            self._add(chunk)
        step.total_tokens = sum(step.num_tokens)
        if vectors:
            self._pool()
        if logprobs:
            rows = zip(step.requests, step.samples, strict=True)
            step.wants_logprobs = any(samples and r.params.num_logprobs is not None for r, samples in rows)
        if masks:
            rows = enumerate(zip(step.requests, step.samples, strict=True))
            step.masked = [row for row, (r, samples) in rows if samples and r.grammar is not None]
        return step

    def _add(self, chunk: Chunk) -> None:
        step, request = self.step, chunk.request
        samples = not request.num_remaining_tokens
        request.num_inflight_tokens += samples
        if request.wants_prompt_logprobs:
            self._ask_prompt_logprobs(chunk)
        step.num_prompt_tokens += max(0, min(chunk.start + chunk.num_tokens, request.num_prompt_tokens) - chunk.start)
        step.requests.append(request)
        step.slots.append(request.slot)
        step.starts.append(chunk.start)
        step.num_tokens.append(chunk.num_tokens)
        step.samples.append(samples)

    def _pool(self) -> None:
        """Asks for the sums of hidden states that vectors are made of, each once in a request's life.

        The rows of these requests sample nothing.
        """
        step = self.step
        for row, request in enumerate(step.requests):
            if request.pooling is None:
                continue
            step.samples[row] = False
            done, end = request.num_pooled_tokens, step.starts[row] + step.num_tokens[row]
            if end > done:
                assert step.starts[row] <= done, "prompt positions were skipped"
                step.pooled.append(PooledRange(row, done, end - done))
                request.num_pooled_tokens = end

    def _ask_prompt_logprobs(self, chunk: Chunk) -> None:
        """Asks for the prompt positions after the tokens that the next row feeds, each once in a request's life."""
        request = chunk.request
        done = request.num_prompt_logprobs
        last = min(chunk.start + chunk.num_tokens, request.num_prompt_tokens - 1)
        if last > done:
            assert chunk.start <= done, "prompt positions were skipped"
            self.step.prompt_ranges.append(PromptRange(len(self.step.requests), done + 1, last - done))
            request.num_prompt_logprobs = last
