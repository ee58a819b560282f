import pytest

from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams


def make(tokens, *, salt=None):
    return Request("r", tokens, SamplingParams(), max_model_len=1000, cache_salt=salt)


def hold(manager, request):
    """Gives a request blocks for all its tokens, as a scheduler would. Returns the shared ones."""
    prefix = manager.find_prefix(request)
    manager.share_prefix(request, prefix)
    manager.cover(request, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.register(request)
    return prefix


def counts(manager):
    return manager.num_free_blocks, manager.num_used_blocks, manager.num_cached_blocks


def test_scratch_is_never_given_out():
    manager = BlockManager(5, 4)
    request = make(range(20))
    hold(manager, request)
    assert sorted(request.block_ids) == [1, 2, 3, 4, 5]
    assert counts(manager) == (0, 5, 0)
    with pytest.raises(AssertionError, match="0 free blocks, not 1"):
        manager.cover(request, 21)


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_only_full_blocks_and_never_the_last_token(length, cached):
    manager = BlockManager(10, 16)
    first, second = make(range(length)), make(range(length))
    assert hold(manager, first) == []
    shared = hold(manager, second)
    assert len(shared) * 16 == cached
    assert shared == first.block_ids[: len(shared)]
    assert not set(second.block_ids[len(shared) :]) & set(first.block_ids), "the recomputed block is its own"
    manager.check_invariants([first.block_ids, second.block_ids])


def test_a_partly_computed_prompt_shares_what_is_scheduled():
    manager = BlockManager(10, 4)
    first = make(range(12))
    manager.share_prefix(first, manager.find_prefix(first))
    assert manager.cover(first, 6) == [(-1, 0, 1), (-1, 1, 2)] and manager.cover(first, 8) == []
    first.num_computed_tokens = 6
    manager.register(first)
    assert manager.find_prefix(make(range(12))) == first.block_ids[:1]


def test_tokens_unknown_on_the_host_are_not_shared():
    manager = BlockManager(10, 4)
    first = make(range(7))
    hold(manager, first)
    first.num_computed_tokens = 8  # the eighth is in flight
    manager.register(first)
    assert first.num_registered_blocks == 1
    first.all_token_ids.append(7)
    manager.register(first)
    assert len(manager.find_prefix(make(range(9)))) == 2


def test_blocks_are_reused_free_ones_first_then_least_recent_tails_first():
    manager = BlockManager(8, 4)
    old, new, partial = make(range(8)), make(range(100, 108)), make([1, 2])
    for request in (old, new, partial):
        hold(manager, request)
    old_ids, new_ids, partial_ids = old.block_ids, new.block_ids, partial.block_ids
    unused = {*range(1, 9)} - {*old_ids, *new_ids, *partial_ids}
    for request in (partial, old, new):
        manager.release(request)
    assert counts(manager) == (4, 0, 4)
    last = make(range(200, 232))
    hold(manager, last)
    assert {*last.block_ids[:4]} == {*partial_ids, *unused}
    assert last.block_ids[4:] == [*reversed(old_ids), *reversed(new_ids)]


def test_a_hit_makes_a_prefix_recent_again():
    manager = BlockManager(4, 4)
    first, second = make(range(5)), make(range(10, 15))
    for request in (first, second):
        hold(manager, request)
        manager.release(request)
    again = make(range(5))
    assert len(hold(manager, again)) == 1
    manager.release(again)
    hold(manager, make(range(20, 32)))  # takes all but one block
    assert manager.find_prefix(make(range(10, 15))) == []
    assert len(manager.find_prefix(make(range(5)))) == 1


def test_a_shared_block_is_free_only_when_all_have_left():
    manager = BlockManager(6, 4)
    first, second = make(range(9)), make(range(9))
    hold(manager, first)
    hold(manager, second)
    manager.check_invariants([first.block_ids, second.block_ids])
    assert counts(manager) == (2, 4, 0)
    manager.release(first)
    assert counts(manager) == (3, 3, 0)
    manager.release(second)
    assert counts(manager) == (4, 0, 2)
    manager.check_invariants([])


def test_num_available_after_counts_only_blocks_that_leave_the_list():
    manager = BlockManager(6, 4)
    first = make(range(9))
    hold(manager, first)
    prefix = manager.find_prefix(make(range(9)))
    assert manager.num_available_after(prefix) == manager.num_available_blocks == 3
    manager.release(first)
    assert manager.num_available_after(prefix) == 4
    assert manager.num_available_blocks == 6


def test_without_prefix_caching_nothing_is_shared():
    manager = BlockManager(8, 4, enable_prefix_caching=False)
    first, second = make(range(9)), make(range(9))
    assert hold(manager, first) == hold(manager, second) == []
    manager.release(first)
    manager.release(second)
    assert counts(manager) == (8, 0, 0)
    manager.check_invariants([])


def test_new_weights_invalidate_everything():
    manager = BlockManager(12, 4)
    gone, running = make(range(9)), make(range(50, 59))
    hold(manager, gone)
    hold(manager, running)
    manager.release(gone)
    manager.reset_prefix_cache()
    assert counts(manager) == (9, 3, 0)
    assert manager.find_prefix(make(range(9))) == manager.find_prefix(make(range(50, 59))) == []
    running.all_token_ids += range(59, 62)  # its blocks mix old and new weights: not to be shared either
    running.num_computed_tokens = 12
    manager.register(running)
    manager.release(running)
    assert counts(manager) == (12, 0, 0)
    running.num_computed_tokens = 0
    assert hold(manager, running) == []  # computed anew, it is
    assert len(manager.find_prefix(make(range(50, 63)))) == 3
    manager.check_invariants([running.block_ids])


def test_collisions_displace_but_never_deceive():
    manager = BlockManager(12, 4, hash_function=lambda data: b"same")
    first, second = make([1] * 8), make([2] * 8)
    hold(manager, first)
    manager.release(first)
    # Equal tokens, equal digests, equal parent digests: only the entry's place in the chain tells them apart.
    assert len(manager.find_prefix(make([1] * 12))) <= 1
    hold(manager, second)
    manager.check_invariants([second.block_ids])
    assert manager.find_prefix(make([1] * 9)) == []
    manager.release(second)
    manager.check_invariants([])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda manager, request: manager._refs.__setitem__(request.block_ids[0], 2),
        lambda manager, request: request.block_ids.pop(),
        lambda manager, request: request.block_ids.append(request.block_ids[0]),
        lambda manager, request: request.block_ids.append(0),
        lambda manager, request: manager._free.push_back(request.block_ids[:1]),
        lambda manager, request: manager._free.pop_front(1),
        lambda manager, request: setattr(manager, "num_cached_blocks", 1),
        lambda manager, request: manager._cache._index.clear(),
    ],
)
def test_check_invariants_sees_broken_books(spoil):
    manager, request = BlockManager(8, 4), make(range(9))
    hold(manager, request)
    manager.check_invariants([request.block_ids])
    spoil(manager, request)
    with pytest.raises(AssertionError):
        manager.check_invariants([request.block_ids])
