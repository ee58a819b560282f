"""Which block holds the keys and values of which token prefix.

A full block is found by a digest that covers its tokens and everything before them:

    root   = H(tagged, length-prefixed extra keys: weight version, cache salt)
    digest = H(parent digest + token ids as 4-byte integers)

A digest only finds a candidate. The candidate is believed when its stored tokens are the ones asked for and
its stored parent is the very entry the search came through, so a colliding or even constant hash function
costs hits, never right answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from struct import Struct

import msgspec

from jaxpaged.core.request import Request

HashFunction = Callable[[bytes], bytes]
Node = int | bytes  # an entry's serial number; for the root, its encoded extra keys
Key = tuple[bytes, bytes]  # what a full block is looked up by: its digest and its tokens


def sha256(data: bytes) -> bytes:
    """The default hash function: 32 bytes."""
    return hashlib.sha256(data).digest()


class Entry(msgspec.Struct, frozen=True, gc=False):  # there are many: garbage collections need not look at them
    """What is known of a cached block.

    Attributes:
      digest: where the index has it.
      parent: the node before it.
      tokens: its token ids as bytes.
      node: its serial number, never given twice: block ids come again, nodes do not.
    """

    digest: bytes
    parent: Node
    tokens: bytes
    node: int


class PrefixCache:
    """An index from prefixes to blocks. It owns no blocks: the block manager says what is entered and removed."""

    def __init__(self, num_blocks: int, block_size: int, hash_function: HashFunction = sha256):
        self.block_size = block_size
        self.weight_version = 0
        self._hash = hash_function
        self._pack = Struct(f"<{block_size}i").pack
        self._index: dict[bytes, int] = {}
        self._entries: list[Entry | None] = [None] * (num_blocks + 1)
        self._num_nodes = 0
        self._asked: Request | None = None  # whom `match` was called for last,
        self._found: dict[int, int] = {}  # and the blocks that it found, in order, each with its place

    def __contains__(self, block: int) -> bool:
        return self._entries[block] is not None

    def __len__(self) -> int:
        return len(self._index)

    @property
    def blocks(self) -> Collection[int]:
        """All cached blocks."""
        return self._index.values()

    def search(self, request: Request, max_blocks: int, most: int) -> bool:
        """Begins or continues what `match` does, by `most` blocks. Returns whether there is nothing left to look up."""
        done = len(self._found) if self._asked is request else 0
        goal = min(max_blocks, done + most)
        return len(self.match(request, goal)) < goal or goal == max_blocks

    def match(self, request: Request, max_blocks: int) -> list[int]:
        """Blocks of the longest cached prefix of a request's tokens, at most `max_blocks`.

        Who is the first to wait asks at every step: the search goes on where the last one for the same request ended.
        """
        self._renew(request)
        if self._asked is not request:
            self._asked, self._found = request, {}
        found = self._found
        node: Node = self._entry(next(reversed(found))).node if found else request.prefix_root
        for i in range(len(found), max_blocks):
            digest, tokens = self._keys(request, i + 1)[i]
            block = self.find(digest, node, tokens)
            if block is None:
                break
            found[block] = i
            node = self._entry(block).node
        return list(found)[:max_blocks]

    def find(self, digest: bytes, parent: Node, tokens: bytes) -> int | None:
        """The block cached under exactly this digest, parent and tokens, or None."""
        block = self._index.get(digest)
        if block is None:
            return None
        entry = self._entry(block)
        return block if entry.parent == parent and entry.tokens == tokens else None

    def resume(self, request: Request, blocks: Sequence[int]) -> None:
        """Notes that `request` starts with these cached blocks: what it enters later comes after them."""
        self._renew(request)
        request.num_registered_blocks = len(blocks)
        request.prefix_node = self._entry(blocks[-1]).node if blocks else request.prefix_root

    def enter(self, request: Request, num_blocks: int) -> list[int]:
        """Makes a request's first `num_blocks` blocks, full of known tokens, findable.

        A prefix that is cached already keeps its block.

        Returns:
          Blocks of other prefixes that lost their entry because their digest collides.
        """
        displaced: list[int] = []
        if request.weight_version != self.weight_version:
            return displaced  # its keys and values are the old weights'
        node = request.prefix_node
        keys = self._keys(request, num_blocks)
        for i in range(request.num_registered_blocks, num_blocks):
            digest, tokens = keys[i]
            known = self._index.get(digest)
            entry = None if known is None else self._entry(known)
            if entry is None or entry.parent != node or entry.tokens != tokens:
                if known is not None:
                    self.remove(known)
                    displaced.append(known)
                block = request.block_ids[i]
                self._num_nodes += 1
                self._index[digest] = block
                self._entries[block] = entry = Entry(digest, node, tokens, self._num_nodes)
            node = entry.node
        request.num_registered_blocks = num_blocks
        request.prefix_node = node
        return displaced

    def remove(self, block: int) -> None:
        """Forgets a cached block, because it is to hold something else."""
        del self._index[self._entry(block).digest]
        self._entries[block] = None
        place = self._found.get(block)
        if place is not None:  # nor can what comes after it be found
            while len(self._found) > place:
                self._found.popitem()

    def clear(self) -> None:
        """Forgets every block and starts a new weight version: requests under way enter nothing more."""
        self._index.clear()
        self._found.clear()
        self._entries = [None] * len(self._entries)
        self.weight_version += 1

    def check_invariants(self) -> None:
        """Raises AssertionError unless index and entries mirror each other."""
        entered = {entry.digest: block for block, entry in enumerate(self._entries) if entry is not None}
        assert entered == self._index, "prefix index and entries disagree"
        assert 0 not in entered.values(), "the scratch block is cached"
        assert list(self._found.values()) == list(range(len(self._found))), "a gap in what was found"
        assert all(block in self for block in self._found), "what was found is not cached any more"

    def _renew(self, request: Request) -> None:
        """Its blocks are going to be of the present weights."""
        if request.weight_version != self.weight_version:
            request.weight_version = self.weight_version
            request.prefix_root = self._root(request)
            request.block_keys.clear()

    def _entry(self, block: int) -> Entry:
        entry = self._entries[block]
        assert entry is not None, f"block {block} is not cached"
        return entry

    def _root(self, request: Request) -> bytes:
        keys = [(b"weights", self.weight_version.to_bytes(8, "little"))]
        if request.cache_salt is not None:
            keys.append((b"salt", request.cache_salt.encode("utf-8", "surrogatepass")))
        # Lengths before contents: no value can pass for another tag, or for the end of the one before.
        return b"".join(
            len(tag).to_bytes(8, "little") + tag + len(value).to_bytes(8, "little") + value for tag, value in keys
        )

    def _keys(self, request: Request, num_blocks: int) -> list[Key]:
        """Those of at least a request's first `num_blocks` blocks, each made once."""
        keys, size, tokens = request.block_keys, self.block_size, request.all_token_ids
        if len(keys) < num_blocks:
            parent = keys[-1][0] if keys else self._hash(request.prefix_root)
            for start in range(len(keys) * size, num_blocks * size, size):
                packed = self._pack(*tokens[start : start + size])
                parent = self._hash(parent + packed)
                keys.append((parent, packed))
        return keys
