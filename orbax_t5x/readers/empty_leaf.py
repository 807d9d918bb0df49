"""Leaf without elements.

The checkpoint records only shape and dtype: Orbax stores no such arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_t5x.lazy.leaf import Leaf, Request
from orbax_t5x.lazy.read_stats import ReadStats


class EmptyLeaf(Leaf):
    """Array of size 0 with known shape and dtype."""

    def __init__(self, name: str, path: str, shape: tuple[int, ...], dtype: np.dtype):
        self.name = name
        self.path = path
        self.shape = shape
        self.dtype = dtype

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Does nothing: every box of it is empty."""
