"""A leaf without elements that the checkpoint only tells of: Orbax stores no such arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_t5x.lazy.leaf import Ledger, Part, Request


class EmptyLeaf:
    """Implements `lazy.Leaf` for an array of size 0; reading it is done before it begins."""

    def __init__(self, name: str, path: str, shape: tuple[int, ...], dtype: np.dtype):
        self.name = name
        self.path = path
        self.shape = shape
        self.dtype = dtype
        self.chunks: tuple[int, ...] | None = None

    async def read_into(self, requests: Sequence[Request], ledger: Ledger) -> None:
        """Does nothing: every box of it is empty."""

    async def settle(self, ledger: Ledger, parts: Sequence[Part]) -> bool | None:
        """There is nothing to check."""
        return None
