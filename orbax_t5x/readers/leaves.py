"""Leaves without bytes to read.

A broken leaf is listed, and using it raises its error: a checkpoint with one damaged entry still opens, its other
leaves are restored, and the damaged one is never dropped in silence. An empty leaf has only shape and dtype: Orbax
stores no such arrays. A known leaf is small, and was read when the checkpoint was opened.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_t5x.errors import CheckpointError, error_at
from orbax_t5x.files.interface import Files, StoredFile
from orbax_t5x.lazy.box import Box
from orbax_t5x.lazy.leaf import BlockingLeaf, Checksums, Leaf, Request
from orbax_t5x.lazy.read_stats import ReadStats

_UNKNOWN = np.dtype(object)


class BrokenLeaf(Leaf):
    """Leaf that cannot be read, often of unknown shape and dtype.

    Unknown, they read as () and object. A plan that needs the leaf raises `error`. Without `is_refused` it can be
    planned, to be renamed and left out, and only reading it raises the error.
    """

    __slots__ = ("_error", "_is_refused", "dtype", "name", "path", "shape")

    def __init__(
        self,
        name: str,
        error: CheckpointError,
        path: str | None = None,
        *,
        shape: tuple[int, ...] = (),
        dtype: np.dtype = _UNKNOWN,
        is_refused: bool = True,
    ):
        """Makes the leaf; `path` is for an error without a file."""
        self.name: str = name
        self.path: str = error.path or path or ""
        self.shape: tuple[int, ...] = shape
        self.dtype: np.dtype = dtype
        # A new one: a traceback would hold the frames of a reader.
        self._error = error_at(error, path=self.path or None, leaf=name)
        self._is_refused = is_refused

    @property
    def error(self) -> CheckpointError | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The error of its use, new each time, or None."""
        return self._new_error() if self._is_refused else None

    def _new_error(self) -> CheckpointError:
        return error_at(self._error, path=self.path or None, leaf=self.name)

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        raise self._new_error()

    def __repr__(self) -> str:
        return f"<BrokenLeaf {self.name!r}: {self._new_error()}>"


class EmptyLeaf(Leaf):
    """Array of size 0 with known shape and dtype."""

    def __init__(self, name: str, path: str, shape: tuple[int, ...], dtype: np.dtype):
        self.name = name
        self.path = path
        self.shape = shape
        self.dtype = dtype

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Does nothing: every box of it is empty."""


class KnownLeaf(BlockingLeaf):
    """Rank-0 array, read at opening: a number, or a string as `bytes`."""

    __slots__ = ("_checksums", "_place", "_value", "dtype", "name", "path", "shape")

    def __init__(
        self,
        name: str,
        place: Files | StoredFile,
        value: np.ndarray,
        *,
        path: str | None = None,
        checksums: Checksums | None = None,
    ):
        self.name: str = name
        self.path: str = place.path if path is None else path
        self.shape: tuple[int, ...] = ()
        self.dtype: np.dtype = value.dtype
        self._place, self._value, self._checksums = place, value, checksums

    @property
    def checksums(self) -> Checksums | None:
        return self._checksums

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        return self.dtype.itemsize if boxes and not self.dtype.hasobject else 0

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        self.read_blocking(requests, stats)

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        self._place.require_open()
        for _, out in requests:
            out[...] = self._value
        stats.count(self.bytes_of(tuple([request.box for request in requests])))
