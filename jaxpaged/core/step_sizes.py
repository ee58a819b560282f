"""How many tokens a step with prompts takes, so that little of what the device computes is padding."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

WORTH = 1 / 8
"""Share of a step that must be saved at least for the end of a prompt to wait."""


class StepSizes:
    """The token counts that steps with prompts are padded to.

    Args:
      sizes: gives those that can be had as of now, ascending; none: steps are not padded.
      step_cost: what one more step costs, however small it is, in tokens of a large one.
    """

    def __init__(self, sizes: Callable[[], Sequence[int]] = tuple, step_cost: int = 0):
        self._sizes, self._step_cost = sizes, step_cost

    def limit(self, most: int) -> int:
        """`most` tokens, or as many as the largest of the sizes holds."""
        sizes = self._sizes()
        return min(most, sizes[-1]) if sizes else most

    def cut(self, wanted: int, num_decoding: int) -> int | None:
        """How many of `wanted` tokens are better computed now, and the others in the next step; None: all of them.

        Args:
          num_decoding: rows that feed one token, in the next step too: for these there will be one in any case.
        """
        sizes = self._sizes()
        at = bisect_left(sizes, wanted)
        if wanted <= num_decoding or not 0 < at < len(sizes):
            return None
        now, whole = sizes[at - 1], sizes[at]
        rest = wanted - now + num_decoding
        if rest > sizes[-1]:
            return None
        later = sizes[bisect_left(sizes, rest)]
        # Decodes are in the next step in any case, and cost it nothing more; a step for the rest alone costs itself.
        saved = whole - now - later
        saved += num_decoding if num_decoding else -self._step_cost
        return now if saved > WORTH * whole else None
