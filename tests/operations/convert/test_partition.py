"""Blocks of a conversion: they make up the arrays, and processes have about equal bytes of them."""

import numpy as np
import pytest

from orbax_t5x.lazy import as_view
from orbax_t5x.operations.convert.partition import PlannedArray, cut_into_blocks, divide_blocks

SHAPES = {"large": (64, 10), "medium": (9, 7), "a": (3,), "b": (2, 2), "c": (5,)}


def planned(name, shape):
    chunk = tuple(max(1, size // 4) for size in shape)
    return PlannedArray(name, name, as_view(np.zeros(shape)), chunk, "small" if len(name) == 1 else "")


def arrays():
    return [planned(name, shape) for name, shape in SHAPES.items()]


def test_blocks_make_up_each_array_once_and_are_numbered_in_order():
    made = arrays()
    blocks = cut_into_blocks(made)
    assert [block.number for block in blocks] == list(range(len(blocks)))
    for array in made:
        counts = np.zeros(array.view.shape, int)
        for block in blocks:
            if block.array is array:
                counts[tuple(slice(*side) for side in block.box)] += 1
        assert (counts == 1).all()
    assert sum(block.nbytes for block in blocks) == sum(array.view.nbytes for array in made)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_each_block_goes_to_one_process_in_order_and_bytes_are_balanced(count):
    blocks = cut_into_blocks(arrays())
    shares = divide_blocks(blocks, count)
    assert len(shares) == count
    assert sorted(block.number for share in shares for block in share) == [block.number for block in blocks]
    assert all([block.number for block in share] == sorted(block.number for block in share) for share in shares)
    sizes = [sum(block.nbytes for block in share) for share in shares]
    assert max(sizes) <= 2 * sum(sizes) / count


def test_small_arrays_of_a_group_stay_together():
    shares = divide_blocks(cut_into_blocks(arrays()), 2)
    with_small = [share for share in shares if any(block.array.group for block in share)]
    assert len(with_small) == 1
    assert {block.array.name for block in with_small[0]} >= {"a", "b", "c"}


def test_a_group_that_would_upset_the_balance_is_divided():
    """Three groups of 3, 3 and 2 equal arrays are 4 arrays for each of two processes."""
    names = [f"{group}{number}" for group, size in (("p", 3), ("q", 3), ("r", 2)) for number in range(size)]
    made = [PlannedArray(name, name, as_view(np.zeros(8)), (8,), name[0]) for name in names]
    assert [len(share) for share in divide_blocks(cut_into_blocks(made), 2)] == [4, 4]
