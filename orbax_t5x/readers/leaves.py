"""Leaves without bytes of their own.

A broken leaf is listed, and using it raises its error: a checkpoint with one damaged entry still opens, its other
leaves are restored, and the damaged one is never dropped in silence. An empty leaf has only shape and dtype: Orbax
stores no such arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_t5x.errors import CheckpointError, error_at
from orbax_t5x.files.limits import charge_metadata
from orbax_t5x.lazy.leaf import Leaf, Request
from orbax_t5x.lazy.read_stats import ReadStats

# Memory of an error, with its text.
_ERROR_BYTES = 512


class BrokenLeaf(Leaf):
    """Leaf of unknown shape and dtype.

    They read as () and object, and a plan that needs it raises `error`. Without `is_refused` it can be planned, to be
    renamed and left out, and only reading it raises the error.
    """

    def __init__(self, name: str, error: CheckpointError, *, is_refused: bool = True):
        charge_metadata(_ERROR_BYTES, error.path or "")
        self.name = name
        self.path: str = error.path or ""
        self.shape: tuple[int, ...] = ()
        self.dtype: np.dtype = np.dtype(object)
        # A new one: the traceback of the old one holds the frames of its reader.
        self._error = error_at(error, path=error.path, leaf=error.leaf)
        self.error: CheckpointError | None = self._error if is_refused else None

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        raise error_at(self._error, path=self._error.path, leaf=self._error.leaf)

    def __repr__(self) -> str:
        return f"<BrokenLeaf {self.name!r}: {self._error}>"


class EmptyLeaf(Leaf):
    """Array of size 0 with known shape and dtype."""

    def __init__(self, name: str, path: str, shape: tuple[int, ...], dtype: np.dtype):
        self.name = name
        self.path = path
        self.shape = shape
        self.dtype = dtype

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Does nothing: every box of it is empty."""
