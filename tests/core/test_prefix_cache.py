import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxpaged.core
from jaxpaged.core.prefix_cache import PrefixCache, sha256
from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams

BLOCK = 2


def make(tokens, *, salt=None):
    return Request("r", tokens, SamplingParams(), max_model_len=1000, cache_salt=salt)


def entered(cache, tokens, block_ids, *, salt=None):
    """Enters a request's full blocks."""
    request = make(tokens, salt=salt)
    cache.match(request, 0)
    cache.resume(request, [])
    request.block_ids = block_ids
    return cache.enter(request, len(block_ids))


def matched(cache, tokens, *, salt=None):
    return cache.match(make(tokens, salt=salt), len(tokens) // BLOCK)


def test_the_longest_prefix_is_found():
    cache = PrefixCache(9, BLOCK)
    entered(cache, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert matched(cache, [1, 2, 3, 4, 5, 6]) == [7, 8, 9]
    assert matched(cache, [1, 2, 3, 4, 0, 0, 5, 6]) == [7, 8]
    assert matched(cache, [3, 4, 5, 6]) == [], "a block counts only after the blocks before it"
    cache.remove(8)
    assert matched(cache, [1, 2, 3, 4, 5, 6]) == [7]


def test_a_prefix_keeps_its_first_block():
    cache = PrefixCache(9, BLOCK)
    assert entered(cache, [1, 2, 3, 4], [1, 2]) == []
    assert entered(cache, [1, 2, 3, 4, 5, 6], [3, 4, 5]) == []
    assert matched(cache, [1, 2, 3, 4, 5, 6]) == [1, 2, 5]
    assert 3 not in cache and 5 in cache and len(cache) == 3


def test_a_child_is_found_again_after_its_parent_was_reused():
    cache = PrefixCache(9, BLOCK)
    entered(cache, [1, 2, 3, 4], [1, 2])
    cache.remove(1)
    assert matched(cache, [1, 2, 3, 4]) == []
    assert entered(cache, [1, 2, 3, 4], [3, 4]) == [2], "the orphan makes way"
    assert matched(cache, [1, 2, 3, 4]) == [3, 4]
    cache.check_invariants()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, ""),
        (None, "a"),
        ("a", "b"),
        ("", "\0"),
        ("a", "a\0"),
        ("x", "\x04\0\0\0\0\0\0\0saltx"),  # the encoding of a tag, as a value
        ("\ud800", "?"),  # a lone surrogate can come from JSON
    ],
)
def test_salts_keep_requests_apart(one, other):
    cache = PrefixCache(9, BLOCK)
    entered(cache, [1, 2, 3, 4], [1, 2], salt=one)
    assert matched(cache, [1, 2, 3, 4], salt=one) == [1, 2]
    assert matched(cache, [1, 2, 3, 4], salt=other) == []


def test_what_is_hashed_is_unambiguous():
    """Different prefixes never hash the same bytes: only a broken hash function can collide."""
    seen: dict[bytes, tuple] = {}
    for version in (0, 1):
        for salt in (None, "", "a", "weights", "salt\0"):
            for tokens in ([1, 23], [12, 3], [123, 0], [0, 123], [258, 0], [1, 2**31 - 1]):
                hashed: list[bytes] = []
                cache = PrefixCache(2, BLOCK, lambda data, hashed=hashed: hashed.append(data) or sha256(data))
                cache.weight_version = version
                matched(cache, tokens, salt=salt)
                root, block = hashed
                assert seen.setdefault(root, (version, salt)) == (version, salt)
                assert seen.setdefault(block, (version, salt, *tokens)) == (version, salt, *tokens)


@pytest.mark.parametrize("digest", [b"", b"\0" * 32])
def test_a_constant_hash_gives_misses_not_wrong_blocks(digest):
    cache = PrefixCache(9, BLOCK, lambda data: digest)
    entered(cache, [1, 2], [1])
    assert matched(cache, [1, 2]) == [1]
    assert matched(cache, [1, 2, 1, 2]) == [1], "the same tokens further on are another prefix"
    assert matched(cache, [2, 1]) == []
    assert matched(cache, [1, 2], salt="a") == []
    assert entered(cache, [3, 4], [2]) == [1]
    assert matched(cache, [1, 2]) == []


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9), st.booleans()), max_size=30), st.integers(0, 1))
def test_asked_again_it_finds_what_a_new_search_would(changes, hashed):
    """The blocks of one chain come and go, also from its middle; `hashed` bytes of a digest count."""
    tokens = [0] * 12
    again, anew = (PrefixCache(200, BLOCK, lambda data: sha256(data)[: 32 if hashed else 1]) for _ in range(2))
    waiting, num_blocks = make(tokens), 0
    for length, block, removes in changes:
        for cache in (again, anew):
            if not removes:
                entered(cache, [*tokens[: 2 * length - 1], block % 2], range(num_blocks + 1, num_blocks + 1 + length))
            elif block in cache:
                cache.remove(block)
            cache.check_invariants()
        num_blocks += length
        assert again.match(waiting, 6) == anew.match(make(tokens), 6)


def test_asked_again_it_looks_up_nothing_twice():
    cache = PrefixCache(9, BLOCK)
    entered(cache, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    request = make([1, 2, 3, 4, 5, 6, 0])
    assert cache.match(request, 3) == [7, 8, 9]
    looked_up = []
    cache.find = lambda *key: looked_up.append(key)
    assert cache.match(request, 3) == [7, 8, 9] and cache.match(request, 2) == [7, 8]
    cache.remove(8)
    assert cache.match(request, 3) == [7] and len(looked_up) == 1
    cache.clear()
    assert cache.match(request, 3) == []


def test_a_search_in_parts_finds_what_one_at_once_does():
    hashed = []
    cache = PrefixCache(9, BLOCK, lambda data: hashed.append(data) or sha256(data))
    entered(cache, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    for tokens, found, parts in [
        ([1, 2, 3, 4, 5, 6, 7, 8], [7, 8, 9], [False, True]),
        ([1, 2, 3, 4, 9, 9, 7, 8], [7, 8], [False, True]),
        ([1, 2, 3, 4, 5], [7, 8], [True]),
        ([9] * 8, [], [True]),
        ([9], [], [True]),
    ]:
        request, hashed[:] = make(tokens), []
        assert [cache.search(request, len(tokens) // BLOCK, 2) for _ in parts] == parts
        assert len(hashed) <= 1 + len(found) + 1, "the root, and what was looked up"
        assert cache.match(request, len(tokens) // BLOCK) == found


def test_a_reused_block_id_is_not_the_old_parent():
    """Block ids come again; a child entered under the old content must not be found under the new."""
    cache = PrefixCache(9, BLOCK, lambda data: data[-4:])  # the last token only
    entered(cache, [1, 2, 3, 4], [1, 2])
    cache.remove(1)
    entered(cache, [9, 2], [1])
    assert matched(cache, [9, 2, 3, 4]) == [1]


def test_clear_starts_a_new_weight_version():
    cache = PrefixCache(9, BLOCK)
    request = make([1, 2, 3, 4])
    cache.match(request, 2)
    cache.resume(request, [])
    request.block_ids = [1, 2]
    cache.enter(request, 1)
    old = list(request.block_keys)
    cache.clear()
    assert cache.enter(request, 2) == [] and len(cache) == 0, "the request under way holds old keys and values"
    assert cache.match(request, 2) == [] and request.block_keys != old
    cache.check_invariants()


def test_core_never_uses_the_builtin_hash():
    """Python's hash is 64 bits and, for integers, predictable: prompts could be made to collide."""
    for path in Path(jaxpaged.core.__file__).parent.glob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert "hash" not in names, path
