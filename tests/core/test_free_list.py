import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.free_list import FreeList


def test_a_new_list_holds_every_block_but_scratch_in_order():
    blocks = FreeList(4)
    assert list(blocks) == [1, 2, 3, 4]
    assert [blocks.pop_front() for _ in range(4)] == [1, 2, 3, 4]
    assert len(blocks) == 0
    with pytest.raises(AssertionError, match="no free block"):
        blocks.pop_front()


def test_mistakes_are_caught():
    blocks = FreeList(2)
    with pytest.raises(AssertionError, match="free already"):
        blocks.push_back(1)
    blocks.remove(1)
    with pytest.raises(AssertionError, match="not free"):
        blocks.remove(1)


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from(["pop", "front", "back", "remove"]), st.integers(1, 6))))
def test_it_is_a_list(size, moves):
    blocks, model = FreeList(size), list(range(1, size + 1))
    for move, block in moves:
        if move == "pop" and model:
            assert blocks.pop_front() == model.pop(0)
        elif move == "remove" and block in model:
            blocks.remove(block)
            model.remove(block)
        elif move in ("front", "back") and block <= size and block not in model:
            getattr(blocks, f"push_{move}")(block)
            model.insert(0 if move == "front" else len(model), block)
        assert list(blocks) == model and len(blocks) == len(model)
        assert [block in blocks for block in range(1, size + 1)] == [b in model for b in range(1, size + 1)]
