import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.free_list import FreeList


def test_a_new_list_holds_every_block_but_scratch_in_order():
    blocks = FreeList(4)
    assert list(blocks) == [1, 2, 3, 4]
    assert blocks.pop_front(3) == [1, 2, 3] and blocks.pop_front(0) == []
    with pytest.raises(AssertionError, match="1 free blocks, not 2"):
        blocks.pop_front(2)
    assert blocks.pop_front(1) == [4] and len(blocks) == 0


def test_mistakes_are_caught():
    blocks = FreeList(2)
    with pytest.raises(AssertionError, match="free already"):
        blocks.push_back([1])
    blocks.remove(1)
    with pytest.raises(AssertionError, match="not free"):
        blocks.remove(1)


_MOVES = st.tuples(st.sampled_from(["pop", "front", "back", "remove"]), st.permutations(range(1, 7)), st.integers(0, 6))


@given(st.integers(1, 6), st.lists(_MOVES))
def test_it_is_a_list(size, moves):
    blocks, model = FreeList(size), list(range(1, size + 1))
    for move, order, count in moves:
        absent = [block for block in order if block <= size and block not in model][:count]
        if move == "pop":
            assert blocks.pop_front(min(count, len(model))) == model[:count]
            del model[:count]
        elif move == "remove" and order[0] in model:
            blocks.remove(order[0])
            model.remove(order[0])
        elif move in ("front", "back"):
            getattr(blocks, f"push_{move}")(absent)
            model = absent + model if move == "front" else model + absent
        assert list(blocks) == model and len(blocks) == len(model)
        assert [block in blocks for block in range(1, size + 1)] == [b in model for b in range(1, size + 1)]
