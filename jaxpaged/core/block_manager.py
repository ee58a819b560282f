"""Who holds which block of the KV pool."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from jaxpaged.core.free_list import FreeList
from jaxpaged.core.prefix_cache import HashFunction, PrefixCache, sha256
from jaxpaged.core.request import Request


class BlockManager:
    """Reference-counted blocks 1 to `num_blocks` of `block_size` tokens; block 0 is scratch, never given out.

    A block is *referenced* (in some request's table), *cached* (in none, but findable as the prefix of a later
    request until it is reused), or *free*. The last two are on one list, least recently used first, and free
    ones before cached ones: `num_available_blocks` counts both.

    A block becomes findable when the step that writes it has been scheduled, not when it has run: steps run in
    order, and in a step every row writes before any row reads. So two equal prompts share even in one step.

    Args:
      num_blocks: size of the pool, scratch not counted.
      block_size: tokens in a block.
      enable_prefix_caching: find and share the blocks of common prefixes.
      search_limit: how many blocks `search_prefix` looks up.
      hash_function: of the prefix cache; only for tests.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        search_limit: int = 1024,  # a few milliseconds
        hash_function: HashFunction = sha256,
    ):
        assert num_blocks >= 1 and block_size >= 1, (num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_cached_blocks = 0
        self._search_limit = search_limit
        self._cache = PrefixCache(num_blocks, block_size, hash_function)
        self._refs = [0] * (num_blocks + 1)
        self._free = FreeList(num_blocks)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be given out: free and cached."""
        return len(self._free)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free) - self.num_cached_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks in some request's table."""
        return self.num_blocks - len(self._free)

    @property
    def findable_blocks(self) -> Collection[int]:
        """Blocks in the prefix cache, referenced or not."""
        return self._cache.blocks

    @property
    def weight_version(self) -> int:
        """How many times the prefix cache was reset."""
        return self._cache.weight_version

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def search_prefix(self, request: Request, most: int | None = None) -> bool:
        """Does a part of what `find_prefix` would do. Returns whether that was the last one: the rest is quick."""
        limit = self._max_prefix(request, most)
        return limit == 0 or self._cache.search(request, limit, self._search_limit)

    def find_prefix(self, request: Request, most: int | None = None) -> list[int]:
        """Blocks of the longest cached prefix of a request that holds none.

        Whole blocks only, and never the last token: it has to be fed for the next one to be sampled.

        Args:
          most: no more blocks than these are of use; None: any number is.
        """
        limit = self._max_prefix(request, most)
        return self._cache.match(request, limit) if limit else []

    def num_available_after(self, prefix: Sequence[int]) -> int:
        """`num_available_blocks` as it would be once `prefix` is shared."""
        return len(self._free) - list(map(self._refs.__getitem__, prefix)).count(0)

    def share_prefix(self, request: Request, prefix: Sequence[int]) -> None:
        """Starts a request's table with the blocks that `find_prefix` found."""
        self._begin(request, prefix)
        self._cache.resume(request, prefix)
        refs = self._refs
        for block in prefix:
            if not refs[block]:
                self._free.remove(block)
                self.num_cached_blocks -= 1
            refs[block] += 1

    def fork(self, request: Request, source: Request, num_tokens: int) -> tuple[int, int] | None:
        """Starts a request's table with what `source` has computed of the first `num_tokens`, the same in both.

        Whole blocks are shared. Of one that is theirs only in part each needs its own, since both will write there.

        Returns:
          The block to be copied, and the one to copy it to; None if there is nothing to copy.
        """
        full, part = divmod(num_tokens, self.block_size)
        self._begin(request, source.block_ids[:full])
        self._cache.resume(request, [])
        for block in request.block_ids:
            self._refs[block] += 1
        request.block_keys = source.block_keys[:full]
        if source.num_registered_blocks == full:  # else what is shared is looked up again
            request.num_registered_blocks, request.prefix_node = full, source.prefix_node
        if not part:
            return None
        self.cover(request, num_tokens)
        return source.block_ids[full], request.block_ids[full]

    def num_shared_blocks(self, request: Request) -> int:
        """How many of a request's first blocks are also others', and so can be found again while they live."""
        if not self.enable_prefix_caching:
            return 0
        refs = self._refs
        return next((i for i, block in enumerate(request.block_ids) if refs[block] == 1), len(request.block_ids))

    def cover(self, request: Request, num_tokens: int) -> list[tuple[int, int, int]]:
        """Appends to a request's table the blocks that it lacks for so many tokens: the least useful available ones.

        There must be as many.

        Returns:
          The new ones, as `Step.new_blocks` has them.
        """
        table, refs, cache = request.block_ids, self._refs, self._cache
        slot, held = request.slot, len(table)
        lacking = self.blocks_for(num_tokens) - held
        new = []
        for index, block in enumerate(self._free.pop_front(lacking) if lacking > 0 else (), held):
            if block in cache:
                cache.remove(block)
                self.num_cached_blocks -= 1
            refs[block] = 1
            table.append(block)
            new.append((slot, index, block))
        return new

    def trim(self, request: Request) -> None:
        """Takes back the last blocks of a request that its computed tokens do not reach."""
        reached = self.blocks_for(request.num_computed_tokens)
        unused = request.block_ids[reached:]
        for block in unused:
            self._refs[block] = 0
        self._free.push_front(unused)
        del request.block_ids[reached:]

    def register(self, request: Request) -> None:
        """Makes the blocks findable that scheduled steps fill with tokens known on the host."""
        if not self.enable_prefix_caching:
            return
        full = min(request.num_computed_tokens, len(request.all_token_ids)) // self.block_size
        if full <= request.num_registered_blocks:
            return
        for block in self._cache.enter(request, full):
            if not self._refs[block]:  # it is on the list as cached
                self._free.remove(block)
                self._free.push_front([block])
                self.num_cached_blocks -= 1

    def release(self, request: Request) -> None:
        """Takes all blocks from a request; of those that can be found again, its tail is to be reused first."""
        self.register(request)
        refs, cache = self._refs, self._cache
        cached: list[int] = []
        unhashed: list[int] = []
        for block in request.block_ids:
            refs[block] -= 1
            if not refs[block]:
                (cached if block in cache else unhashed).append(block)
        self._free.push_front(unhashed)
        self._free.push_back(cached[::-1])
        self.num_cached_blocks += len(cached)
        request.block_ids = []
        request.num_registered_blocks = 0

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix, because the weights changed. Blocks in use stay with their requests."""
        self._cache.clear()
        self.num_cached_blocks = 0

    def _max_prefix(self, request: Request, most: int | None) -> int:
        limit = request.max_prefix_tokens // self.block_size if self.enable_prefix_caching else 0
        return limit if most is None else min(limit, most)

    def _begin(self, request: Request, blocks: Sequence[int]) -> None:
        assert not request.block_ids, f"{request.request_id} holds blocks already"
        request.block_ids = list(blocks)

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the books agree with the given tables, one for each request with blocks."""
        refs = [0] * (self.num_blocks + 1)
        for table in tables:
            assert len(set(table)) == len(table), f"a block twice in one table: {table}"
            for block in table:
                assert 1 <= block <= self.num_blocks, f"block {block} is not in the pool"
                refs[block] += 1
        assert refs == self._refs, "reference counts differ from table entries"
        listed = list(self._free)
        assert len(set(listed)) == len(listed) == len(self._free), "the free list is broken"
        assert set(listed) == {b for b in range(1, self.num_blocks + 1) if not refs[b]}, "free and referenced overlap"
        kinds = [block in self._cache for block in listed]
        assert sum(kinds) == self.num_cached_blocks, "cached blocks miscounted"
        assert kinds == sorted(kinds), "a cached block would be reused before a free one"
        assert self.num_free_blocks + self.num_used_blocks + self.num_cached_blocks == self.num_blocks
        assert self.enable_prefix_caching or not len(self._cache)
        self._cache.check_invariants()
