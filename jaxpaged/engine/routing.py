"""Which of several engine cores a request goes to: where its prefix may be cached, unless that one is busier."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

BLOCK_TOKENS = 64  # prefixes are known in multiples of these
MAX_BLOCKS = 256  # of one prompt that are looked at
MAX_PREFIXES = 1 << 16  # that are remembered; the least recently used go first
SLACK = 4  # more live requests than the least busy core that a core may have for a prefix's sake
SLACK_SHARE = 0.25  # or this share of the least busy core's


class Router:
    """Spreads requests over cores. Safe to use from many threads.

    Attributes:
      loads: live requests of each core.
    """

    def __init__(self, num_cores: int):
        self.loads = [0] * num_cores
        self._homes: OrderedDict[bytes, int] = OrderedDict()  # prefix -> the core that computed it last
        self._next = 0  # where to look first for the least busy core
        self._lock = threading.Lock()

    def route(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """Chooses the core for a prompt, and counts the request as live there until `ended`."""
        if len(self.loads) == 1:
            prefixes: list[bytes] = []
        else:
            prefixes = list(_prefixes(token_ids, cache_salt))
        with self._lock:
            core = self._choose(prefixes)
            self.loads[core] += 1
            for prefix in prefixes:
                self._homes[prefix] = core
                self._homes.move_to_end(prefix)
            while len(self._homes) > MAX_PREFIXES:
                self._homes.popitem(last=False)
        return core

    def ended(self, core: int) -> None:
        """A request that was sent there lives no more."""
        with self._lock:
            self.loads[core] -= 1

    def _choose(self, prefixes: Sequence[bytes]) -> int:
        loads, count = self.loads, len(self.loads)
        least = min(loads)
        for prefix in reversed(prefixes):  # the longest first
            home = self._homes.get(prefix)
            if home is not None and loads[home] <= least + max(SLACK, SLACK_SHARE * least):
                return home
        core = next(i % count for i in range(self._next, self._next + count) if loads[i % count] == least)
        self._next = core + 1
        return core


def _prefixes(token_ids: Sequence[int], cache_salt: str | None) -> Iterator[bytes]:
    """Names of a prompt's prefixes, from the shortest on; of equal names the prefixes and salts are equal."""
    digest = hashlib.sha256(b"" if cache_salt is None else b"salt" + cache_salt.encode(errors="surrogatepass"))
    for start in range(0, min(len(token_ids), MAX_BLOCKS * BLOCK_TOKENS) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        digest.update(struct.pack(f"<{BLOCK_TOKENS}q", *token_ids[start : start + BLOCK_TOKENS]))
        yield digest.digest()
