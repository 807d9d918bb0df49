"""Arrays of shapes that a file claims, and errors about memory.

What a file claims about an array decides how much memory is allocated. Python's own error for too much names no file
and no leaf.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import numpy as np

from orbax_t5x.errors import LimitExceededError, error_at

_PAGE_BYTES = mmap.PAGESIZE
# From here on NumPy asks the kernel for huge pages.
_HUGE_PAGE_BYTES = 1 << 22
# What is touched at once to learn what it costs.
_TRIAL_BYTES = 16 << 20
# The C library takes so much from the kernel; of less, pages may be there from a use before.
_FRESH_BYTES = 48 << 20
_CLEARLY_CHEAPER = 0.8


def empty_array(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Allocates an array of a shape that a file claims."""
    try:
        array = np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        nbytes = math.prod(shape) * dtype.itemsize
        what = f"an array of {dtype.name} of shape {tuple(shape)}"
        raise LimitExceededError(f"{what} takes {nbytes} bytes, which cannot be had: {error}") from None
    if array.nbytes >= _HUGE_PAGE_BYTES:
        _pages.apply(array)
    return array


def strided(array: np.ndarray, shape: Sequence[int], strides: Sequence[int], *, writeable: bool = True) -> np.ndarray:
    """Returns a view of an array at any strides, in bytes.

    NumPy's `as_strided` takes a dtype by its text, and that of some of ml_dtypes (float8_e5m2: `<f1`) it does not know.
    So the memory is viewed as raw elements in between.
    """
    if array.dtype.hasobject:
        return np.lib.stride_tricks.as_strided(array, tuple(shape), tuple(strides), writeable=writeable)
    raw = array.view(np.dtype((np.void, array.itemsize)))
    return np.lib.stride_tricks.as_strided(raw, tuple(shape), tuple(strides), writeable=writeable).view(array.dtype)


class PageChoice:
    """Huge or small pages for large arrays, by their measured cost.

    Huge pages cost a third of small ones where memory is at hand. Where the kernel has to make room for them first, and
    on virtual machines whose host gives memory as it is touched, they cost several times as much. The first array that
    is surely fresh memory tells: its first bytes are touched in small pages, the rest in huge ones, part by part. The
    first part that is not clearly cheaper ends huge pages for the process: from then on NumPy's request for them is
    undone, as it is before that array. With the variable NUMPY_MADVISE_HUGEPAGE set NumPy's way stays.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time):
        self._clock = clock
        # Seconds for a byte in small pages, once they are known.
        self._small: float | None = None
        self._is_huge = True

    def apply(self, array: np.ndarray) -> None:
        """Advises the kernel on the pages of a new array."""
        madvise = _madvise()
        if madvise is None or "NUMPY_MADVISE_HUGEPAGE" in os.environ:
            return
        start = array.ctypes.data
        at, last = -(-start // _PAGE_BYTES) * _PAGE_BYTES, (start + array.nbytes) // _PAGE_BYTES * _PAGE_BYTES
        if self._is_huge and not array.dtype.hasobject and (self._small is not None or array.nbytes >= _FRESH_BYTES):
            memory = array.reshape(-1).view(np.uint8)
            if self._small is None:
                madvise(at, _TRIAL_BYTES, mmap.MADV_NOHUGEPAGE)
                self._small = self._cost(memory[at - start :][:_TRIAL_BYTES])
                at += _TRIAL_BYTES
            while at < last and self._is_huge:
                part = memory[at - start :][:_TRIAL_BYTES]
                self._is_huge = self._cost(part) < _CLEARLY_CHEAPER * self._small
                at += part.size
        if at < last and not (self._is_huge and self._small is not None):
            madvise(at, last - at, mmap.MADV_NOHUGEPAGE)

    def _cost(self, memory: np.ndarray) -> float:
        began = self._clock()
        memory[::_PAGE_BYTES] = 0
        return (self._clock() - began) / memory.size


_pages = PageChoice()


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Returns the system's `madvise`, or None."""
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


class naming_memory_errors(AbstractContextManager[None]):
    """Context that types errors about memory, with their file and leaf.

    It is a class, because it is entered for each leaf.
    """

    __slots__ = ("_leaf", "_path")

    def __init__(self, path: str | None, leaf: str):
        self._path, self._leaf = path or None, leaf

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return
        if isinstance(error, MemoryError):
            message = f"there is not enough memory: {error}"
            raise LimitExceededError(message, path=self._path, leaf=self._leaf) from None
        if isinstance(error, LimitExceededError) and error.leaf is None and error.path is None:
            raise error_at(error, path=self._path, leaf=self._leaf) from None
