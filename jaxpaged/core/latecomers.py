"""Requests that begin like one whose prompt is being computed, while they wait for what they share with it.

A prompt that takes several steps is found in the prefix cache only as far as it has been scheduled. Whoever comes
meanwhile and shares more of it would compute the rest a second time, and slow the first one down.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxpaged.core.request import Request, Status


class Latecomers:
    """Parked requests, each behind an earlier one that runs.

    Args:
      block_size: tokens in a block; only whole ones are shared.
    """

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._held: list[tuple[Request, Request, int]] = []  # who, behind whom, until so many tokens are scheduled

    @property
    def parked(self) -> list[Request]:
        """Live requests that wait here."""
        return [request for request, _, _ in self._held if request.status is not Status.FINISHED]

    def num_before(self, request: Request) -> int:
        """How many wait here that go before a request."""
        return sum(held.sort_key < request.sort_key for held, _, _ in self._held)

    def hold(self, request: Request, num_found_tokens: int, running: Iterable[Request]) -> bool:
        """Holds a request, to be parked, if one of `running` is about to compute more of its prefix than was found."""
        for leader in running:
            # Never behind a later one, who gets tokens after it.
            if leader.num_remaining_tokens and leader.sort_key < request.sort_key:
                until = self._num_shared(request, leader, num_found_tokens)
                if until > max(num_found_tokens, leader.num_computed_tokens):
                    self._held.append((request, leader, until))
                    return True
        return False

    def release(self, weight_version: int) -> list[Request]:
        """The requests that find what they waited for, or never will: the one before them has lost its slot.

        Args:
          weight_version: as of now; what is computed for another one cannot be shared.
        """
        released, held = [], []
        for entry in self._held:
            request, leader, until = entry
            if request.status is Status.FINISHED:
                continue
            there = leader.num_computed_tokens >= until or leader.weight_version != weight_version
            if there or leader.status is not Status.RUNNING:
                released.append(request)
            else:
                held.append(entry)
        self._held = held
        return released

    def _num_shared(self, request: Request, leader: Request, num_found_tokens: int) -> int:
        """How many tokens of whole blocks one can take from the other; what was found, or less, if there is no more."""
        if leader.cache_salt != request.cache_salt or leader.weight_version != request.weight_version:
            return 0
        size, mine, theirs = self._block_size, request.all_token_ids, leader.all_token_ids
        same, most = num_found_tokens // size, min(request.max_prefix_tokens, len(theirs)) // size
        next_block = slice(same * size, (same + 1) * size)
        if mine[next_block] != theirs[next_block] or mine[: same * size] != theirs[: same * size]:
            return 0  # the first comparison tells, as a rule
        while same < most:  # the largest number of blocks that are the same in both
            middle = (same + most + 1) // 2
            if mine[same * size : middle * size] == theirs[same * size : middle * size]:
                same = middle
            else:
                most = middle - 1
        return same * size
