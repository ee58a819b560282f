"""The order in which blocks are given out: a doubly linked list with O(1) removal anywhere."""

from __future__ import annotations

from collections.abc import Iterator

_ABSENT = -1


class FreeList:
    """Blocks nobody refers to, next one to be reused first.

    Links live in two arrays indexed by block id. Block 0, the scratch block that is never given out, closes
    the ring. A new list holds blocks 1 to num_blocks in order.
    """

    __slots__ = ("_next", "_prev", "_size")

    def __init__(self, num_blocks: int):
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]
        self._size = num_blocks

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block: int) -> bool:
        return self._next[block] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]

    def pop_front(self) -> int:
        """Takes the block to be reused next. The list must not be empty."""
        block = self._next[0]
        assert block, "no free block"
        self.remove(block)
        return block

    def push_front(self, block: int) -> None:
        """`block` will be reused first."""
        self._insert(0, block)

    def push_back(self, block: int) -> None:
        """`block` will be reused last."""
        self._insert(self._prev[0], block)

    def remove(self, block: int) -> None:
        """Takes `block` out from wherever it is. It must be in the list."""
        before, after = self._prev[block], self._next[block]
        assert after != _ABSENT, f"block {block} is not free"
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = self._prev[block] = _ABSENT
        self._size -= 1

    def _insert(self, before: int, block: int) -> None:
        assert self._next[block] == _ABSENT, f"block {block} is free already"
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self._size += 1
