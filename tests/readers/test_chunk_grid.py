"""Chunks of an array and the boxes in them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.lazy import Request, box_shape, box_size, box_slices
from orbax_t5x.readers.chunk_grid import count_chunks, requests_by_chunk
from tests.support.array_strategies import boxes


@given(st.data())
def test_pieces_of_chunks_are_the_elements_of_the_boxes_each_once(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3)))
    chunks = tuple([data.draw(st.integers(1, 5)) for _ in shape])
    wanted = {box: np.zeros(shape, int) for box in data.draw(st.lists(boxes(shape), max_size=3)) if box_size(box)}
    by_chunk = list(
        requests_by_chunk([Request(box, out[(*box_slices(box), ...)]) for box, out in wanted.items()], chunks)
    )
    for pieces in by_chunk:
        for piece, out in pieces:
            assert out.shape == box_shape(piece)
            out += 1
    touched = set()
    for box, seen in wanted.items():
        expected = np.zeros(shape, int)
        expected[box_slices(box)] = 1
        np.testing.assert_array_equal(seen, expected)
        touched |= {tuple(index // np.array(chunks, int)) for index in np.argwhere(expected)}
    assert count_chunks(wanted, chunks) == len(by_chunk) == len(touched)
