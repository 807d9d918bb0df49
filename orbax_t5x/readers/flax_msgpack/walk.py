"""The tree of a Flax msgpack file, arrays as offsets.

One walk over the headers, without recursion: nesting costs an entry of an explicit list and has a limit. A key is
text and occurs once in its map. What Flax packs into extensions (arrays, NumPy scalars, complex numbers) becomes a
place in the file, proven to hold as many bytes as its shape and dtype need; an extension that cannot be made sense of
is an error of only that leaf, a header that cannot be is one of the file.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from orbax_t5x.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsupportedCheckpointError,
    error_at,
)
from orbax_t5x.files.interface import StoredFile
from orbax_t5x.readers.ranges.window_reader import WindowReader

# Numbers by first byte, from 0xCA on.
_NUMBER_FORMS = (">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q")
_NUMBERS = {first: struct.Struct(form) for first, form in enumerate(_NUMBER_FORMS, 0xCA)}
# First byte -> kind of value, and of how many bytes its length is.
_SIZED = {
    0xC4: ("bytes", 1),
    0xC5: ("bytes", 2),
    0xC6: ("bytes", 4),
    0xC7: ("extension", 1),
    0xC8: ("extension", 2),
    0xC9: ("extension", 4),
    0xD9: ("text", 1),
    0xDA: ("text", 2),
    0xDB: ("text", 4),
    0xDC: ("array", 2),
    0xDD: ("array", 4),
    0xDE: ("map", 2),
    0xDF: ("map", 4),
}
# Extensions of a fixed length.
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
# The fewest bytes of what a count counts: an element, or a key and its value.
_LEAST_BYTES = {"array": 1, "map": 2}


class Header(NamedTuple):
    """A parsed header.

    Attributes:
      kind: "value" (a number, a bool or nil), "text", "bytes", "extension", "array" or "map".
      size: the bytes that follow, or the number of elements or pairs; 0 for a value.
      value: the number, the bool or None; the code of an extension.
    """

    kind: str
    size: int = 0
    value: Any = None


def _short_header(first: int) -> Header | None:
    """Parses a one-byte header, or returns None."""
    if first <= 0x7F:
        return Header("value", 0, first)
    if first <= 0x8F:
        return Header("map", first & 0x0F)
    if first <= 0x9F:
        return Header("array", first & 0x0F)
    if first <= 0xBF:
        return Header("text", first & 0x1F)
    if first >= 0xE0:
        return Header("value", 0, first - 0x100)
    constants = {0xC0: None, 0xC2: False, 0xC3: True}
    return Header("value", 0, constants[first]) if first in constants else None


# By first byte. Most headers of a tree of names are short, and are not made anew each time.
_SHORT = tuple(map(_short_header, range(0x100)))
# Of each, the fewest bytes that must follow; of a value nothing is announced.
_SHORT_LEAST = [
    short.size * _LEAST_BYTES.get(short.kind, 1) if short is not None and short.kind != "value" else -math.inf
    for short in _SHORT
]


class HeaderReader(WindowReader):
    """Reader of msgpack headers and short byte strings in file order."""

    def header(self) -> Header:
        """Reads the next header."""
        at = self._at
        if at < len(self._data):
            first, self._at = self._data[at], at + 1
        else:
            first = self.take(1)[0]
        short = _SHORT[first]
        if short is not None:
            return short if _SHORT_LEAST[first] <= self.stop - self._base - self._at else self._announced(short)
        if first in _SIZED:
            kind, width = _SIZED[first]
            return self._sized(kind, int.from_bytes(self.take(width), "big"))
        if first in _NUMBERS:
            number = _NUMBERS[first]
            return Header("value", 0, number.unpack(self.take(number.size))[0])
        if first in _FIXED_EXTENSIONS:
            return self._sized("extension", _FIXED_EXTENSIONS[first])
        raise self.corrupt(f"the byte {first:#04x} begins no msgpack value")

    def _sized(self, kind: str, size: int) -> Header:
        code = None
        if kind == "extension":
            code = int.from_bytes(self.take(1), "big", signed=True)
        return self._announced(Header(kind, size, code))

    def _announced(self, header: Header) -> Header:
        """Returns a header after proving that its announced bytes fit."""
        kind, size, _ = header
        if size * _LEAST_BYTES.get(kind, 1) <= self.left:
            return header
        if kind in _LEAST_BYTES:
            raise self.corrupt(f"a {kind} of {size} entries in the {self.left} bytes that are left")
        raise self.corrupt(f"{kind} of {size} bytes, and {self.left} are left")


# Codes of Flax's extensions.
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
# Longer texts stay in the file; names of dtypes, paths and drivers are shorter.
_KEPT_TEXT_BYTES = 4096
_LONGEST_DTYPE_BYTES = 64
_SHOWN_NAME_CHARS = 4096

_DTYPES: dict[str, np.dtype] = {
    dtype.name: dtype
    for dtype in map(
        np.dtype,
        (
            *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
            *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
            *(ml_dtypes.bfloat16, ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.int4, ml_dtypes.uint4),
            *(ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float8_e4m3fn),
            *(ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz),
            *(ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn),
        ),
    )
}


class StoredArray(NamedTuple):
    """Row-major array at `start` of the file."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class StoredText(NamedTuple):
    """Text or bytes at `start` of the file, kept if short."""

    start: int
    size: int
    short: bytes | None


class BrokenNode(NamedTuple):
    """Invalid leaf and its error without a name."""

    error: CheckpointError


Node: TypeAlias = (
    "dict[str, Node] | list[Node] | StoredArray | StoredText | BrokenNode | bool | int | float | complex | None"
)


def walk(file: StoredFile) -> tuple[Node, int]:
    """Walks over a msgpack file with text keys."""
    walker = _MessageWalker(file)
    tree = walker.run()
    return tree, walker.reader.bytes_read


class _OpenContainer(NamedTuple):
    """Container with entries still to be read."""

    node: dict[str, Node] | list[Node]
    size: int


class _MessageWalker:
    def __init__(self, file: StoredFile):
        self.reader = HeaderReader(file)
        self._path = file.path
        self._limits = file.limits
        self._keys: list[str] = []
        self._values = 0

    def run(self) -> Node:
        """Walks over the file and returns its tree."""
        stack: list[_OpenContainer] = []
        keys = self._keys
        while True:
            node = self._value(len(stack))
            if isinstance(node, _OpenContainer):
                stack.append(node)
            else:
                while stack:
                    container, size = stack[-1]
                    key = keys.pop()
                    if isinstance(container, dict):
                        container[key] = node
                    else:
                        container.append(node)
                    if len(container) < size:
                        break
                    node = stack.pop().node
                if not stack:
                    break
            container = stack[-1].node
            keys.append(self._key(container) if isinstance(container, dict) else str(len(container)))
        if self.reader.left:
            raise self.reader.corrupt(f"{self.reader.left} bytes follow the end of the tree")
        return node

    def _key(self, container: dict[str, Node]) -> str:
        header = self.reader.header()
        kind, size, _ = header
        if kind != "text":
            raise self.reader.corrupt(f"a key is {_header_text(header)}, not text", self._name)
        try:
            key = self.reader.take(size).decode()
        except UnicodeDecodeError:
            raise self.reader.corrupt("a key is not UTF-8", self._name) from None
        if key in container:
            raise self.reader.corrupt(f"the key {key[:200]!r} occurs twice in one map", self._name)
        return key

    def _value(self, depth: int) -> Node | _OpenContainer:
        """Reads the next value."""
        self._values += 1
        if self._values > self._limits.entries:
            self._limits.require_entries(self._values, self._path)
        try:
            header = self.reader.header()
        except CorruptCheckpointError as error:
            raise error_at(error, path=self._path, leaf=self._name) from None
        kind, size, value = header
        if kind == "value":
            return value
        if kind == "extension":
            return self._extension(header)
        if kind in ("text", "bytes"):
            return self._text(size)
        self._limits.require_entries(self._values + size, self._path)
        node: dict[str, Node] | list[Node] = {} if kind == "map" else []
        if depth >= self._limits.nesting:
            raise LimitExceededError(
                f"at byte {self.reader.position}: nested deeper than Limits.nesting = {self._limits.nesting}",
                path=self._path,
                leaf=self._name,
            )
        return _OpenContainer(node, size) if size else node

    @property
    def _name(self) -> str | None:
        return "/".join(self._keys)[:_SHOWN_NAME_CHARS] or None

    def _text(self, size: int) -> StoredText:
        start = self.reader.position
        if size <= _KEPT_TEXT_BYTES:
            return StoredText(start, size, self.reader.take(size))
        self.reader.skip(size)
        return StoredText(start, size, None)

    # -- extensions

    def _extension(self, header: Header) -> Node:
        """Parses an extension, or returns its fault; the walk continues behind it."""
        reader = self.reader
        end, outer = reader.position + header.size, reader.stop
        reader.stop = end
        try:
            if header.value == _COMPLEX:
                return self._complex()
            if header.value in (_ARRAY, _SCALAR):
                return self._array()
            raise reader.corrupt(f"the extension {header.value} is none of Flax's")
        except CheckpointError as error:
            return BrokenNode(error_at(error, path=self._path, leaf=None))
        finally:
            reader.stop = outer
            reader.skip(end - reader.position)

    def _complex(self) -> complex:
        self._expect("array", 2, "a complex number")
        parts = [self.reader.header() for _ in range(2)]
        if self.reader.left or not all(isinstance(part.value, (int, float)) for part in parts):
            raise self.reader.corrupt("a complex number is not two numbers")
        return complex(parts[0].value, parts[1].value)

    def _array(self) -> StoredArray:
        """Parses an array's shape, dtype and offset."""
        reader = self.reader
        self._expect("array", 3, "an array")
        rank = self._expect("array", None, "the shape of an array")
        self._limits.require_rank(rank)
        sizes = [reader.header() for _ in range(rank)]
        shape = tuple(size.value for size in sizes)
        if not all(type(size) is int and size >= 0 for size in shape):
            raise reader.corrupt(f"the shape is {list(shape)}")
        dtype = self._dtype()
        header = reader.header()
        if header.kind not in ("bytes", "text") or header.size != reader.left:
            raise reader.corrupt(f"the bytes of an array are {_header_text(header)}, and {reader.left} bytes are left")
        array = StoredArray(reader.position, shape, dtype)
        self._limits.require_shape(shape, dtype)
        if array.nbytes != header.size:
            raise reader.corrupt(f"{dtype.name} of shape {list(shape)}, and {header.size} bytes for it")
        return array

    def _dtype(self) -> np.dtype:
        header = self.reader.header()
        if header.kind not in ("bytes", "text") or header.size > _LONGEST_DTYPE_BYTES:
            raise self.reader.corrupt(f"the name of a dtype is {_header_text(header)}")
        name = self.reader.take(header.size).decode(errors="replace")
        if name not in _DTYPES:
            raise UnsupportedCheckpointError(f"its dtype {name!r} is not one of numbers that are read")
        return _DTYPES[name]

    def _expect(self, kind: str, size: int | None, what: str) -> int:
        header = self.reader.header()
        if header.kind != kind or size not in (None, header.size):
            raise self.reader.corrupt(f"{what} is {_header_text(header)}")
        return header.size


def _header_text(header: Header) -> str:
    return repr(header.value) if header.kind == "value" else f"{header.kind} of size {header.size}"
