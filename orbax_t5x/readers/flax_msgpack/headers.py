"""Msgpack headers of a file in order.

They tell the kind and the length of each value; its bytes are never read.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

from orbax_t5x.readers.ranges.window_reader import WindowReader

_NUMBERS = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
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
