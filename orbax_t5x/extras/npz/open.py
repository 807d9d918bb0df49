"""NumPy's `.npz` files: a ZIP archive of arrays.

Stored members are read by range, compressed members whole. Opening reads the archive's directory and the header of each
array.
"""

from __future__ import annotations

import math
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError, UnsupportedCheckpointError
from orbax_t5x.files.crc import CRC32
from orbax_t5x.files.places import files_at, open_directory_of, within_limits
from orbax_t5x.files.windows import WINDOW_BYTES
from orbax_t5x.lazy.box import full_box, union_size
from orbax_t5x.lazy.leaf import FileExtent, Leaf, Request
from orbax_t5x.lazy.read_stats import ReadStats
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.leaves import BrokenLeaf
from orbax_t5x.readers.ranges.elements import Elements
from orbax_t5x.readers.ranges.leaf import RangeLeaf
from orbax_t5x.readers.ranges.windowed import Scatter, WindowGrid, union_runs
from orbax_t5x.readers.zip_leaf import ZipLeaf, row_major
from orbax_t5x.readers.zip_members import DEFLATED, STORED, Archive

_READ_BYTES = 1 << 20
# Of a read: what was read, decompressed, held over and placed.
_WORKING_BYTES = 4 * WINDOW_BYTES
# A raw stream without the header and the checksum of zlib.
_RAW = -15


def decompress_head(data: bytes, size: int) -> bytes:
    """Decompresses the first `size` bytes of a member, or fewer.

    The member's beginning is enough.

    Raises:
      CorruptCheckpointError: without the file.
    """
    try:
        return zlib.decompressobj(_RAW).decompress(data, size)
    except zlib.error as error:
        raise CorruptCheckpointError(f"it cannot be decompressed: {error}") from None


class DeflatedLeaf(RangeLeaf):
    """An array in a compressed member; `chunks` is its whole shape."""

    __slots__ = ("_archive", "_header", "_member", "_start", "chunks")

    def __init__(self, name: str, archive: Archive, member: str, start: int, header: ArrayHeader):
        super().__init__(name, archive.file, header.shape, header.dtype)
        self._archive, self._member, self._start = archive, member, start
        self._header = header
        self.chunks: tuple[int, ...] | None = tuple(max(1, size) for size in header.shape)

    @property
    def chunk_checksum(self) -> str | None:
        return None if self._archive.members[self._member].crc is None else "zip"

    @property
    def extent(self) -> FileExtent | None:
        # What is decompressed together with others takes no memory that `read_into` would have to wait for.
        is_small = self._archive.members[self._member].size <= WINDOW_BYTES
        return self._archive.extent(self._member) if is_small else None

    @property
    def working_bytes(self) -> int:
        return min(_WORKING_BYTES, self._archive.members[self._member].size)

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        await stats.decoding.take(self.working_bytes)
        try:
            await super().read_into(requests, stats)
        finally:
            stats.decoding.give(self.working_bytes)

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        self._archive.file.require_open()
        wanted = [request for request in requests if request.out.size]
        if not wanted:
            return
        shape, stored = self.shape, wanted
        if self._header.strides != row_major(shape):
            # By columns: the rows of the transposed array.
            shape, stored = shape[::-1], [Request(box[::-1], out.T) for box, out in wanted]
        itemsize = self.dtype.itemsize
        grid = WindowGrid(shape, itemsize, WINDOW_BYTES)
        scatter = Scatter(shape, grid.depth, stored, Elements(self.dtype, self._header.swap, self.path, self.name))
        pieces = self._decompressed()
        held = bytearray()
        read_over = self._start
        for window in grid.windows(union_runs(shape, itemsize, [full_box(shape)], 0)[0]):
            while len(held) < read_over + window.stop - window.start:
                held += next(pieces)
            data = np.frombuffer(bytes(held[read_over : read_over + window.stop - window.start]), np.uint8)
            scatter.window(window, data)
            del held[: read_over + data.size]
            read_over = 0
        for _ in pieces:
            pass  # what it ends with is compared
        stats.prove_unchanged(self._archive.file, leaf=self.name)
        stats.count(union_size(tuple([request.box for request in wanted])) * itemsize)

    def _decompressed(self) -> Iterator[bytes]:
        """Yields the decompressed member; at its end, size and checksum are compared."""
        member = self._archive.members[self._member]
        start = self._archive.local_start(self._member)
        ranges = [(at, min(_READ_BYTES, member.stored - at)) for at in range(0, member.stored, _READ_BYTES)]
        file = self._archive.file.ahead((start + at, size) for at, size in ranges)
        buffer = np.empty(min(_READ_BYTES, member.stored), np.uint8)
        stream = zlib.decompressobj(_RAW)
        crc = found = 0
        try:
            for at, size in ranges:
                file.read_into(start + at, [buffer[:size]], leaf=self.name)
                data = buffer[:size].tobytes()
                is_full = True
                # A full piece may leave some of its input's output in the stream.
                while (data or is_full) and found <= member.size:
                    piece = stream.decompress(data, _READ_BYTES)
                    data, is_full = stream.unconsumed_tail, len(piece) == _READ_BYTES
                    crc, found = CRC32.extend(crc, piece), found + len(piece)
                    yield piece
        except zlib.error as error:
            raise self._corrupt(f"it cannot be decompressed: {error}") from None
        if found != member.size or not stream.eof or stream.unused_data:
            raise self._corrupt(f"its member decompresses to other than {member.size} bytes")
        if member.crc is not None and crc != member.crc:
            raise self._corrupt("its member does not have its crc32; the data are damaged")

    def _corrupt(self, message: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(message, path=self.path, leaf=self.name)


MAGIC = b"\x93NUMPY"
# Magic, version, and the size of the text in two bytes; from version 2 on in four.
_SIZE_AT = len(MAGIC) + 2
LONGEST_FIXED_BYTES = _SIZE_AT + 4
# NumPy's own bound on the text.
_LONGEST_TEXT_BYTES = 10_000
_MAX_INT = 2**63 - 1
_ITEM = re.compile(
    r"""\s*(['"])(?P<key>descr|fortran_order|shape)\1\s*:\s*
    (?:(['"])(?P<text>[^'"\\]*)\3 | (?P<flag>True|False) | \((?P<sizes>[0-9L,\s]*)\))\s*(?:,\s*|(?=\}))""",
    re.VERBOSE,
)
_LIST = re.compile(r"""['"]descr['"]\s*:\s*[\[(]""")
_NUMBER = re.compile(r"(?P<order>[<>|=]?)(?P<kind>[a-zA-Z?])(?P<size>[0-9]{0,9})")
_KINDS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
# Big Vision and Scenic mean bfloat16, which NumPy writes as two bytes of no type.
_DTYPES = {kind: np.dtype(kind) for kind in _KINDS} | {"V2": np.dtype(ml_dtypes.bfloat16)}


class ArrayHeader(NamedTuple):
    """Description of an array; `strides` count elements, `swap` is that of `ByteRange`."""

    dtype: np.dtype
    swap: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def header_bytes(first: bytes) -> int:
    """Returns a header's size from its first `LONGEST_FIXED_BYTES`."""
    if len(first) < LONGEST_FIXED_BYTES or not first.startswith(MAGIC) or first[len(MAGIC)] not in (1, 2, 3):
        raise CorruptCheckpointError(f"it begins with {first[:10]!r}, not as an array of NumPy does")
    width = 2 if first[len(MAGIC)] == 1 else 4
    size = int.from_bytes(first[_SIZE_AT : _SIZE_AT + width], "little")
    if size > _LONGEST_TEXT_BYTES:
        raise CorruptCheckpointError(f"a header of {size} bytes, and NumPy takes {_LONGEST_TEXT_BYTES}")
    return _SIZE_AT + width + size


def parse_npy_header(data: bytes) -> ArrayHeader:
    """Parses a header."""
    text = data[_SIZE_AT + (2 if data[len(MAGIC)] == 1 else 4) :].decode("latin-1").strip()
    if _LIST.search(text):
        raise UnsupportedCheckpointError("its elements are structures of several fields")
    found: dict[str, re.Match[str]] = {}
    at = 1
    while match := _ITEM.match(text, at):
        found[match["key"]] = match
        at = match.end()
    complete = text.startswith("{") and text[at:] == "}" and len(found) == 3
    if not complete or None in (found["descr"]["text"], found["fortran_order"]["flag"], found["shape"]["sizes"]):
        raise CorruptCheckpointError(f"its header is {text[:200]!r}")
    dtype, swap = _parse_dtype(found["descr"]["text"])
    shape = _parse_shape(found["shape"]["sizes"])
    strides = row_major(shape)
    if found["fortran_order"]["flag"] == "True":
        strides = row_major(shape[::-1])[::-1]
    return ArrayHeader(dtype, swap, shape, strides)


def _parse_shape(text: str) -> tuple[int, ...]:
    digits = [size.strip().removesuffix("L") for size in text.split(",") if size.strip()]
    if not all(size.isdecimal() and len(size) < 20 and int(size) <= _MAX_INT for size in digits):
        raise CorruptCheckpointError(f"its shape is ({text[:200]})")
    return tuple(map(int, digits))


def _parse_dtype(text: str) -> tuple[np.dtype, bool]:
    match = _NUMBER.fullmatch(text)
    if match is not None and match["kind"] == "O":
        raise UnsafeCheckpointError("its elements are Python objects, which are a pickle; nothing was loaded")
    kind = "" if match is None else match["kind"].replace("?", "b1") + match["size"]
    if match is None or kind not in _DTYPES:
        raise UnsupportedCheckpointError(f"its dtype {text[:100]!r} is not one of numbers that are read")
    dtype = _DTYPES[kind]
    other = ">" if sys.byteorder == "little" else "<"
    return dtype, match["order"] == other and dtype.itemsize > 1


_ARRAY_SUFFIX = ".npy"
# Enough for a local header and an array's own, of nearly all members.
_HEAD_BYTES = 2048
# The tables of codes with which deflate begins take less.
_TABLE_BYTES = 1024
# Deflate makes no more of a byte.
_MOST_EXPANSION = 1032
_METHODS = (STORED, DEFLATED)


@within_limits
def open_npz(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a file."""
    given = files_at(os.fspath(path))
    files, name = open_directory_of(given.named)
    archive = Archive(files.file(name))
    heads = archive.read_heads(_HEAD_BYTES)
    leaves: dict[str, Leaf] = {}
    for member in archive.members:
        leaf = member.removesuffix(_ARRAY_SUFFIX)
        files.limits.require_name(leaf, archive.file.path)
        if leaf in leaves:
            raise CorruptCheckpointError("two members have this name", path=archive.file.path, leaf=leaf)
        leaves[leaf] = _leaf_of_member(leaf, archive, member, heads)
    return Checkpoint(
        path=given.named,
        format="npz",
        step=None,
        leaves=leaves,
        metadata={"files": [name]},
        close=files.close,
        index_bytes=archive.index_bytes,
    )


def _leaf_of_member(name: str, archive: Archive, member: str, heads: Mapping[str, bytes]) -> Leaf:
    """Makes the leaf of a member, broken if it is unreadable."""
    try:
        return _array_leaf(name, archive, member, heads[member])
    except CheckpointError as error:
        return BrokenLeaf(name, error, archive.file.path)


def _array_leaf(name: str, archive: Archive, member: str, head: bytes) -> Leaf:
    found = archive.members[member]
    if not member.endswith(_ARRAY_SUFFIX) or found.method not in _METHODS:
        raise UnsupportedCheckpointError(f"{member!r} is no array of NumPy, stored or deflated")
    data = _array_head(archive, member, head)
    header = parse_npy_header(data)
    archive.file.limits.require_shape(header.shape, header.dtype)
    if found.size != len(data) + header.nbytes or found.size > _MOST_EXPANSION * found.stored:
        raise CorruptCheckpointError(
            f"{header.dtype.name} of shape {list(header.shape)} takes {header.nbytes} bytes, and its member has "
            f"{found.size - len(data)} in {found.stored}"
        )
    if found.method == DEFLATED:
        return DeflatedLeaf(name, archive, member, len(data), header)
    shape, strides, dtype, swap = header.shape, header.strides, header.dtype, header.swap
    return ZipLeaf(name, archive, member, len(data), shape, strides, dtype, swap=swap, head=data)


def _array_head(archive: Archive, member: str, head: bytes) -> bytes:
    """Reads an array's header; `head` begins the member."""
    found = archive.members[member]
    start = archive.local_start(member, head)

    def first(size: int) -> bytes:
        """Returns bytes of the member.

        Compressed bytes may begin with their tables of codes.
        """
        stored = min(found.stored, size if found.method == STORED else 2 * size + _TABLE_BYTES)
        data = archive.near(start, stored, found.header, head)
        return data[:size] if found.method == STORED else decompress_head(data, size)

    size = header_bytes(first(LONGEST_FIXED_BYTES))
    data = first(size)
    if len(data) != size:
        raise CorruptCheckpointError(f"it ends within its header of {size} bytes")
    return data
