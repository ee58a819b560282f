"""How many tokens the next step may have, and how prompts share them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from jaxpaged.core.draft import Chunk
from jaxpaged.core.request import Request, Status
from jaxpaged.core.step_sizes import StepSizes


class Budget:
    """Knows the limits of steps.

    Args:
      max_num_batched_tokens, max_num_seqs: tokens and rows of the largest step.
      block_size: tokens in a block.
      sizes: what steps with prompts are padded to.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int, block_size: int, sizes: StepSizes):
        self._most, self._max_rows = max_num_batched_tokens, max_num_seqs
        self._block_size, self._sizes = block_size, sizes
        self._cut_short: list[Request] = []  # those whose prompt the last step has not ended

    def num_tokens(self, running: Sequence[Request], waiting: Sequence[Request]) -> int:
        """Most tokens of the next step: all that may be, or as many as fill a padded shape.

        That rests on an estimate: prefixes may be found, and blocks be lacking. Then there is padding, as without it.
        """
        most, rows = self._sizes.limit(self._most), len(running)
        if not (self._cut_short or waiting):
            return most
        prompts = [request for request in self._cut_short if request.status is Status.RUNNING]
        decoding = wanted = rows - len(prompts)
        for request in itertools.chain(prompts, waiting[: self._max_rows - rows]):
            wanted += request.num_remaining_tokens
            if wanted >= most:
                return most
        budget = self._sizes.cut(wanted, decoding)
        return budget if budget is not None and budget > rows else most

    def share(self, remaining: int, left: int) -> int:
        """How many of a prompt's `remaining` tokens go into a step that has room for `left`, at first."""
        if remaining > self._sizes.limit(self._most):
            left = max(left // 2, min(left, self._block_size))
        return min(remaining, left)

    def note(self, chunks: Iterable[Chunk]) -> None:
        """To be told what a step computes of prompts."""
        self._cut_short = [chunk.request for chunk in chunks if chunk.request.num_remaining_tokens]
