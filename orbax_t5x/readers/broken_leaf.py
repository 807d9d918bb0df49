"""Leaf that the checkpoint names and that cannot be parsed: it is listed, and using it raises its error.

So a checkpoint with one damaged entry still opens, its other leaves are restored, and the damaged one is never dropped
in silence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_t5x.errors import CheckpointError
from orbax_t5x.lazy.leaf import Leaf, Request
from orbax_t5x.lazy.read_stats import ReadStats


class BrokenLeaf(Leaf):
    """Leaf whose shape and dtype are unknown; they read as () and object, and a plan that needs it raises `error`."""

    def __init__(self, name: str, error: CheckpointError):
        self.name = name
        self.path: str = error.path or ""
        self.shape: tuple[int, ...] = ()
        self.dtype: np.dtype = np.dtype(object)
        self.error: CheckpointError | None = error

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        self.raise_error()

    def __repr__(self) -> str:
        return f"<BrokenLeaf {self.name!r}: {self.error}>"
