"""The blocks of preempted requests in host memory: how many fit, and what the next step has to move."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpaged.core.step import Step, Swap


class HostPool:
    """Bookkeeping only. Moves are noted when they are decided, and travel with the next step that is launched.

    Args:
      num_blocks: most blocks in host memory.
    """

    def __init__(self, num_blocks: int = 0):
        self.num_blocks = num_blocks
        self.num_used_blocks = 0
        self._sizes: dict[int, int] = {}  # blocks of each copy, by key
        self._num_keys = 0
        self._out: list[Swap] = []
        self._in: list[Swap] = []
        self._dropped: list[int] = []

    def save(self, block_ids: Sequence[int]) -> int | None:
        """Copies blocks to the host before anything else is written to them. Returns the key, or None: no room."""
        if self.num_used_blocks + len(block_ids) > self.num_blocks:
            return None
        self._num_keys += 1
        self._sizes[self._num_keys] = len(block_ids)
        self.num_used_blocks += len(block_ids)
        self._out.append(Swap(self._num_keys, list(block_ids)))
        return self._num_keys

    @property
    def num_copies(self) -> int:
        """Requests that have blocks here."""
        return len(self._sizes)

    def size(self, key: int) -> int:
        """Blocks of a copy."""
        return self._sizes[key]

    def restore(self, key: int, block_ids: Sequence[int]) -> None:
        """Copies them back, to these blocks; the key is used up."""
        assert len(block_ids) == self._sizes[key], "the copy has another size"
        self.num_used_blocks -= self._sizes.pop(key)
        self._in.append(Swap(key, list(block_ids)))

    def drop(self, key: int) -> None:
        """Nobody wants the copy any more."""
        self.num_used_blocks -= self._sizes.pop(key)
        launched = len(self._out)
        self._out = [swap for swap in self._out if swap.key != key]
        if len(self._out) == launched:
            self._dropped.append(key)

    @property
    def has_dropped(self) -> bool:
        """Whether there are copies in host memory that nobody will ask for."""
        return bool(self._dropped)

    def take_dropped(self) -> list[int]:
        """Their keys, each told once."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def flush(self, step: Step) -> None:
        """Puts what is to be moved into a step that will be launched."""
        step.dropped, step.swap_out, step.swap_in = self.take_dropped(), self._out, self._in
        self._out, self._in = [], []

    def check_invariants(self, copies: dict[int, int]) -> None:
        """Raises AssertionError unless the books agree with `copies`: key -> blocks, of each request that has one."""
        assert copies == self._sizes, "host copies differ from the requests that have one"
        assert self.num_used_blocks == sum(copies.values()) <= self.num_blocks
        assert not self._in, "a copy is restored by a step that was launched already"
