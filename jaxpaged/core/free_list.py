"""The order in which blocks are given out: a doubly linked list with O(1) removal anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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

    def pop_front(self, count: int) -> list[int]:
        """Takes the blocks to be reused next. The list must hold as many."""
        assert count <= self._size, f"{self._size} free blocks, not {count}"
        following, preceding = self._next, self._prev
        blocks, block = [], following[0]
        for _ in range(count):
            blocks.append(block)
            after = following[block]
            following[block] = preceding[block] = _ABSENT
            block = after
        following[0], preceding[block] = block, 0
        self._size -= count
        return blocks

    def push_front(self, blocks: Sequence[int]) -> None:
        """`blocks` will be reused first, in their order."""
        self._insert(0, blocks)

    def push_back(self, blocks: Sequence[int]) -> None:
        """`blocks` will be reused last, in their order."""
        self._insert(self._prev[0], blocks)

    def remove(self, block: int) -> None:
        """Takes `block` out from wherever it is. It must be in the list."""
        before, after = self._prev[block], self._next[block]
        assert after != _ABSENT, f"block {block} is not free"
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = self._prev[block] = _ABSENT
        self._size -= 1

    def _insert(self, before: int, blocks: Sequence[int]) -> None:
        following, preceding = self._next, self._prev
        after = following[before]
        for block in blocks:
            assert following[block] == _ABSENT, f"block {block} is free already"
            following[before], following[block], preceding[block] = block, after, before
            before = block
        preceding[after] = before
        self._size += len(blocks)
