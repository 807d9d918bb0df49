"""A leaf that the checkpoint names and that cannot be parsed.

It is listed, and using it raises its error.

So a checkpoint with one damaged entry still opens, its other leaves are restored, and the damaged one is never dropped
in silence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_t5x.errors import CheckpointError, error_at
from orbax_t5x.lazy.leaf import Leaf, Request
from orbax_t5x.lazy.read_stats import ReadStats


class BrokenLeaf(Leaf):
    """Leaf of unknown shape and dtype.

    They read as () and object, and a plan that needs it raises `error`.

    Without `is_refused` it can be planned, to be renamed and left out, and only reading it raises the error.
    """

    def __init__(self, name: str, error: CheckpointError, *, is_refused: bool = True):
        self.name = name
        self.path: str = error.path or ""
        self.shape: tuple[int, ...] = ()
        self.dtype: np.dtype = np.dtype(object)
        self.error: CheckpointError | None = error if is_refused else None
        self._error = error

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        raise error_at(self._error, path=self._error.path, leaf=self._error.leaf)

    def __repr__(self) -> str:
        return f"<BrokenLeaf {self.name!r}: {self._error}>"
