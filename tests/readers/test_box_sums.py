"""Checksums of boxes, compared while boxes of any shape are read."""

import itertools

import google_crc32c
import hypothesis
import hypothesis.strategies as st
import numpy as np

from orbax_t5x.lazy.leaf import Request
from orbax_t5x.readers.box_sums import BoxSums, array_crc, compare_box_sums, sums_of


@st.composite
def grids(draw):
    """A shape, and boxes that tile it."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    sides = [list(itertools.pairwise(marks)) for marks in cuts]
    return tuple(shape), tuple(itertools.product(*sides))


@hypothesis.given(grid=grids(), data=st.data(), dtype=st.sampled_from(["float32", "int4", "uint8", "complex64"]))
def test_reads_that_tile_an_array_verify_its_boxes_and_find_any_change(grid, data, dtype):
    shape, boxes = grid
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    cut = [tuple(slice(*side) for side in box) for box in boxes]
    mask = 15 if dtype == "int4" else 255
    crcs = [google_crc32c.value(bytes(byte & mask for byte in array[index].tobytes())) for index in cut]
    sums = BoxSums(shape, dtype, boxes, tuple(crcs))
    assert [array_crc(array[index]) for index in cut] == crcs
    marks = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    sides = [list(itertools.pairwise(edges)) for edges in marks]
    reads = [Request(box, array[tuple(slice(*side) for side in box)].copy()) for box in itertools.product(*sides)]
    # As one process reads them, and as several processes read one each.
    for parts in (list(sums_of(reads, sums)), [part for read in reads for part in sums_of([read], sums)]):
        assert compare_box_sums(parts, sums) == ([], None)
        assert compare_box_sums(parts[1:], sums).uncovered or len(parts) > len(boxes)
    spoiled = data.draw(st.sampled_from(reads))
    place = tuple(data.draw(st.integers(0, size - 1)) for size in spoiled.out.shape)
    spoiled.out[place] = np.asarray(spoiled.out[place] + np.asarray(1, dtype)).astype(dtype)
    assert compare_box_sums(list(sums_of(reads, sums)), sums).mismatch is not None
