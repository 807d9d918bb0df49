"""Chunks of an array: their shapes, and the boxes that they cover."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.lazy.chunks import choose_chunk, grid_boxes

MIB = 1 << 20


@given(
    st.lists(st.integers(1, 300), max_size=4),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 1 << 16),
    st.lists(st.integers(1, 40), min_size=4, max_size=4),
    st.booleans(),
)
def test_chunks_tile_the_array_and_respect_limit_and_source(shape, itemsize, limit, unit, chunked):
    unit = [min(size, part) for size, part in zip(shape, unit, strict=False)] if chunked else None
    chunk = choose_chunk(shape, itemsize, limit, unit)
    assert len(chunk) == len(shape) and all(part >= 1 for part in chunk)
    least = int(np.prod(unit or [1] * len(shape), dtype=np.int64)) * itemsize
    assert int(np.prod(chunk, dtype=np.int64)) * itemsize <= max(limit, least)
    for size, part, source in zip(shape, chunk, unit or [1] * len(shape), strict=True):
        assert part == size or part % source == 0
    if int(np.prod(shape, dtype=np.int64)) < 20_000:
        covered = np.zeros(shape, int)
        for box in grid_boxes(shape, chunk):
            covered[tuple(slice(*bounds) for bounds in box)] += 1
        assert (covered == 1).all()


def test_chunks_are_rows_cut_evenly():
    assert choose_chunk((32128, 4096), 4, 64 * MIB) == (4016, 4096)
    assert choose_chunk((1024, 1024, 1024), 4, 64 * MIB) == (16, 1024, 1024)
    assert choose_chunk((1 << 30,), 1, 64 * MIB) == (64 * MIB,)
    assert choose_chunk((100, 100), 4, 64 * MIB) == (100, 100)
    assert choose_chunk((), 8, 1) == ()
    # Source chunks are joined, never cut.
    assert choose_chunk((64, 1000), 4, 40_000, (8, 250)) == (8, 1000)
    assert choose_chunk((64, 1000), 4, 100, (8, 250)) == (8, 250)
