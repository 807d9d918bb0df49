"""The header of a `.npy` member, parsed by a pattern.

It is a dict literal of three keys, and never evaluated.
"""

from __future__ import annotations

import math
import re
import sys
from typing import NamedTuple

import ml_dtypes
import numpy as np

from orbax_t5x.errors import CorruptCheckpointError, UnsafeCheckpointError, UnsupportedCheckpointError
from orbax_t5x.readers.ranges.strided import row_major

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
