"""Layout of a chunked array before it is opened.

Shape, dtype and chunks come from metadata or from TensorStore itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np
import tensorstore as ts


class ArrayLayout(NamedTuple):
    """Shape, dtype and chunk grids of a chunked array.

    `shard` holds the index of its chunks; `chunk` is decoded at a time.

    They are the same where chunks are stored by themselves, and () for a rank-0 array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    shard: tuple[int, ...]

    @classmethod
    def of(cls, array: ts.TensorStore) -> ArrayLayout:
        """Returns the layout of an array that is open."""
        shape = tuple(array.shape)
        layout = array.chunk_layout
        chunk, shard = layout.read_chunk.shape or shape, layout.write_chunk.shape or shape
        return cls(shape, np.dtype(array.dtype.numpy_dtype), _cell(chunk, shape), _cell(shard, shape))


def _cell(sizes: Sequence[int | None], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a grid's cells."""
    if all(sizes):
        return cast("tuple[int, ...]", tuple(sizes))
    return tuple([max(1, size or whole) for size, whole in zip(sizes, shape, strict=True)])


class HasLayout(Protocol):
    """Array with a layout that is known before opening."""

    @property
    def layout(self) -> ArrayLayout:
        """The layout."""
        ...


def layout_of(array: ts.TensorStore | HasLayout) -> ArrayLayout:
    """Returns the layout of an array, open or not."""
    return ArrayLayout.of(array) if isinstance(array, ts.TensorStore) else array.layout
