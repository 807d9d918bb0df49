"""The nodes of a msgpack tree by name, and their leaves.

An array is a byte range of the file. One that Flax cut into chunks, because msgpack has no values above 4 GiB, is
several ranges read as one. Numbers are known from the walk; long texts stay in the file until they are read.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from orbax_t5x.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.interface import ReadAhead, StoredFile
from orbax_t5x.files.windows import MAX_GAP_BYTES
from orbax_t5x.lazy.box import Box
from orbax_t5x.lazy.leaf import FileExtent, Leaf, Request
from orbax_t5x.lazy.read_stats import ReadStats
from orbax_t5x.readers.flax_msgpack.walk import BrokenNode, Node, StoredArray, StoredText
from orbax_t5x.readers.leaves import BrokenLeaf, KnownLeaf
from orbax_t5x.readers.ranges.byte_range import ByteRange
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf, RangeLeaf

_CHUNKED = "__msgpack_chunked_array__"
# A long key above many values is in the name of each: all names together may have this many times the file's bytes.
_NAME_CHARS_PER_FILE_BYTE = 4
_FREE_NAME_CHARS = 1 << 20
_END: tuple[None, Node] = (None, None)
# Under which Flax's functions kept arrays beside the file.
_BESIDE = b"//GDAPlaceholder:"
# How texts of early Orbax refer to arrays.
_PLACEHOLDER = b"PLACEHOLDER://"


def named_nodes(
    tree: Node, file: StoredFile, is_leaf: Callable[[dict[str, Node]], bool] = lambda node: False
) -> Iterator[tuple[str, Node]]:
    """Yields the leaves and empty nodes of a tree by name."""

    def entries_of(node: Node) -> Iterator[tuple[str, Node]] | None:
        if isinstance(node, dict) and node and _CHUNKED not in node and not is_leaf(node):
            return iter(node.items())
        return ((str(index), child) for index, child in enumerate(node)) if isinstance(node, list) and node else None

    if is_empty(tree):
        return
    entries = entries_of(tree)
    if entries is None:
        yield "", tree
        return
    seen: set[str] = set()
    chars_left = _FREE_NAME_CHARS + _NAME_CHARS_PER_FILE_BYTE * file.size
    stack = [("", entries)]
    while stack:
        prefix, entries = stack[-1]
        key, node = next(entries, _END)
        if key is None:
            stack.pop()
            continue
        chars_left -= len(prefix) + len(key)
        if chars_left < 0:
            raise LimitExceededError(
                f"all names together have more than {_NAME_CHARS_PER_FILE_BYTE} times the bytes of the file",
                path=file.path,
            )
        name = prefix + key
        if (inner := entries_of(node)) is not None:
            stack.append((f"{name}/", inner))
            continue
        file.limits.require_name(name, file.path)
        file.limits.require_entries(len(seen) + 1, file.path)
        if name in seen:
            raise CorruptCheckpointError("two leaves have this name", path=file.path, leaf=name)
        seen.add(name)
        yield name, node


def is_empty(node: Node) -> bool:
    """Tests if a node is None or an empty container."""
    return node is None or (isinstance(node, (dict, list)) and not node)


def msgpack_leaf(name: str, node: Node, file: StoredFile) -> Leaf:
    """Makes the leaf of a node that is not empty."""
    try:
        return _valid_leaf(name, node, file)
    except CheckpointError as error:
        return BrokenLeaf(name, error, file.path)


def _valid_leaf(name: str, node: Node, file: StoredFile) -> Leaf:
    if isinstance(node, StoredArray):
        return ByteRangeLeaf(name, ByteRange(file, node.start, node.shape, node.dtype))
    if isinstance(node, BrokenNode):
        raise node.error
    if isinstance(node, StoredText):
        if node.short is not None and node.short.startswith(_BESIDE):
            raise _array_beside(node.short[len(_BESIDE) :])
        return TextLeaf(name, file, node.start, node.size)
    if isinstance(node, dict):
        return _chunked_leaf(name, node, file)
    return KnownLeaf(name, file, _msgpack_number(node))


def _array_beside(path: bytes) -> CheckpointError:
    text = path.decode(errors="replace")
    if text.startswith("/") or ".." in text.split("/"):
        return UnsafeCheckpointError(f"it refers to the array {text[:200]!r} outside of the checkpoint")
    return UnsupportedCheckpointError(
        f"its array is beside the file, under {text[:200]!r}, in the layout of Flax's GlobalDeviceArrays, which is "
        "not read; restore it with the Flax that wrote it"
    )


def _msgpack_number(value: Any) -> np.ndarray:
    """Returns a Python number as NumPy has it, integers in 64 bits."""
    if isinstance(value, int) and not isinstance(value, bool):
        return np.array(value, np.int64 if value < 1 << 63 else np.uint64)
    return np.array(value)


def _chunked_leaf(name: str, node: dict[str, Node], file: StoredFile) -> ByteRangeLeaf:
    """Makes the leaf of an array stored in flat chunks."""
    shape = _in_index_order(node.get("shape"), "shape")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise CorruptCheckpointError(f"the shape of a chunked array is {shape}")
    chunks = _in_index_order(node.get("chunks"), "chunks")
    if not chunks or not all(isinstance(chunk, StoredArray) for chunk in chunks):
        raise CorruptCheckpointError("a chunk of a chunked array is missing, or is no array")
    dtypes = {chunk.dtype for chunk in chunks}
    elements = sum(math.prod(chunk.shape) for chunk in chunks)
    if len(dtypes) != 1 or elements != math.prod(shape):
        raise CorruptCheckpointError(
            f"chunks of {elements} elements of {', '.join(sorted(map(str, dtypes)))} for an array of shape {shape}"
        )
    file.limits.require_shape(shape, chunks[0].dtype)
    return ChunkedLeaf(
        name, JoinedExtents(file, [(chunk.start, chunk.nbytes) for chunk in chunks]), shape, chunks[0].dtype
    )


def _in_index_order(node: Node, what: str) -> list[Any]:
    """Returns the values of a map from "0", "1", … to them."""
    if not isinstance(node, dict):
        raise CorruptCheckpointError(f"the {what} of a chunked array are missing")
    try:
        return [node[str(index)] for index in range(len(node))]
    except KeyError as error:
        raise CorruptCheckpointError(f"the {what} of a chunked array have no number {error}") from None


class JoinedExtents:
    """Byte ranges (start, size), joined to the file of a `ByteRange`."""

    def __init__(self, file: StoredFile, extents: Sequence[tuple[int, int]]):
        self._file = file
        self._extents = [(start, size) for start, size in extents if size]
        self._begins = list(itertools.accumulate((size for _, size in self._extents), initial=0))
        self.path: str = file.path
        self.is_remote: bool = file.is_remote
        self.size: int = self._begins.pop() if self._extents else 0

    @property
    def extent(self) -> FileExtent | None:
        """The bytes that hold the ranges, unless they lie apart."""
        if not self._extents:
            return None
        start, stop = min(self._extents)[0], max(start + size for start, size in self._extents)
        return FileExtent(self._file, start, stop) if stop - start - self.size < MAX_GAP_BYTES else None

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        """Implements `StoredBytes.read_into`; `offset` counts from the first byte of the first range."""
        self._read(self._file, offset, buffers, leaf)

    def ahead(self, ranges: Iterable[tuple[int, int]]) -> ReadAhead:
        """Implements `StoredBytes.ahead`."""
        in_file = (run for offset, size in ranges for run in self._in_file(offset, size))
        return _JoinedReadAhead(self, self._file.ahead(in_file))

    def _in_file(self, offset: int, size: int) -> Iterator[tuple[int, int]]:
        """Yields (offset, size) in the file for a joined range."""
        number = bisect.bisect_right(self._begins, offset) - 1
        while size:
            start, length = self._extents[number]
            inside = offset - self._begins[number]
            count = min(size, length - inside)
            yield start + inside, count
            offset, size, number = offset + count, size - count, number + 1

    def _read(self, file: ReadAhead, offset: int, buffers: Sequence[np.ndarray], leaf: str | None) -> None:
        views = [buffer.reshape(-1).view(np.uint8) for buffer in buffers]
        for start, size in self._in_file(offset, sum(view.size for view in views)):
            into: list[np.ndarray] = []
            while size:
                run = views[0][:size]
                views[0] = views[0][run.size :]
                size -= run.size
                if run.size:
                    into.append(run)
                if not views[0].size:
                    views.pop(0)
            file.read_into(start, into, leaf=leaf)

    def check_unchanged(self, *, leaf: str | None = None) -> None:
        """Implements `StoredBytes.check_unchanged`."""
        self._file.check_unchanged(leaf=leaf)


class _JoinedReadAhead:
    """Announced reads of joined ranges."""

    def __init__(self, joined: JoinedExtents, file: ReadAhead):
        self._joined = joined
        self._file = file

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        self._joined._read(self._file, offset, buffers, leaf)


class ChunkedLeaf(ByteRangeLeaf):
    """Array in several ranges of a file."""

    __slots__ = ("_joined",)

    def __init__(self, name: str, joined: JoinedExtents, shape: Sequence[int], dtype: np.dtype):
        super().__init__(name, ByteRange(joined, 0, tuple(shape), dtype))
        self._joined = joined

    @property
    def extent(self) -> FileExtent | None:
        return self._joined.extent


class TextLeaf(RangeLeaf):
    """Rank-0 array of text or bytes, with dtype object."""

    __slots__ = ("_file", "_size", "_start")

    def __init__(self, name: str, file: StoredFile, start: int, size: int):
        super().__init__(name, file, (), np.dtype(object))
        self._file = file
        self._start = start
        self._size = size

    @property
    def extent(self) -> FileExtent:
        return FileExtent(self._file, self._start, self._start + self._size)

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        return self._size if boxes else 0

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        self._file.require_open()
        value = bytes(self._file.read(self._start, self._size, leaf=self.name))
        stats.prove_unchanged(self._file, leaf=self.name)
        for _, out in requests:
            out[...] = value
        stats.count(self._size)


def is_early_item(tree: dict[str, Node]) -> bool:
    """Tests if a msgpack tree's leaf refers to an Orbax array."""
    stack: list[Node] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            stack += node.values()
        elif isinstance(node, list):
            stack += node
        elif placeholder(node) is not None:
            return True
    return False


def placeholder(node: Node) -> str | None:
    """Returns the name of a node's array, or None."""
    if isinstance(node, StoredText) and node.short is not None and node.short.startswith(_PLACEHOLDER):
        return node.short[len(_PLACEHOLDER) :].decode(errors="replace")
    return None
