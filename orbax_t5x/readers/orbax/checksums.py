"""`_CHECKSUMS.json`: the checksums of an item's arrays.

Orbax does not read this file.

It is written by this package's saves. One JSON object: `version` (1), `leaves`, and `crc32c`, the checksum of `leaves`
as compact JSON with sorted keys. `leaves` maps the key under which Orbax stores a leaf to its `shape`, its `dtype`,
the `boxes` of the array as lists of start and stop of each dimension in turn, and the `crc32c` of each box (see
`readers.box_sums`). A string has the dtype "string", no dimension and one box.

Nothing in the file decides what is read: the worst that a hostile one can do is to call good data damaged, or, beside
data that its author changed as well, to be no witness. It finds damage, not forgery.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from orbax_t5x.errors import CheckpointError, CheckpointIOError, CorruptCheckpointError, UnsupportedCheckpointError
from orbax_t5x.files.crc import CRC32C
from orbax_t5x.files.interface import Files
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.strict_json import parse_object
from orbax_t5x.lazy.leaf import Checksums, UnusableChecksums
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats
from orbax_t5x.readers.box_sums import BoxSums
from orbax_t5x.text.wording import listed

STRING = "string"
"""The dtype of strings, which Orbax stores in a file of their own."""
_VERSION = 1
_KEYS = frozenset({"version", "leaves", "crc32c"})
# More names than this in one error hide the first.
_SHOWN_NAMES = 5


def read_item_sums(root: Files, name: str, params: Sequence[str]) -> Mapping[str, BoxSums | CheckpointError]:
    """Reads the checksums of an item's leaves, or why they are unusable."""
    path = root.join(name)
    try:
        leaves = parse_checksums(root.read_whole(name, limit=root.limits.index_bytes), path, root.limits)
        if partial := [param for param, sums in leaves.items() if not sums.is_complete]:
            raise CorruptCheckpointError(f"the boxes of {_listed(partial)} do not tile the array", path=path)
    except CheckpointIOError:
        raise
    except CheckpointError as error:
        return dict.fromkeys(params, error)
    unknown = sorted(leaves.keys() - set(params))
    if not unknown:
        return leaves
    others = sorted(set(params) - leaves.keys())
    message = f"the checksums are of another tree: they name {_listed(unknown)}, which this item lacks"
    if others:
        message += f"; the item has {_listed(others)}, which they lack"
    return dict.fromkeys(params, CorruptCheckpointError(message, path=path))


def _listed(names: Sequence[str]) -> str:
    return listed([repr(name[:200]) for name in names], _SHOWN_NAMES)


def encode_checksums(leaves: Mapping[str, BoxSums]) -> bytes:
    """Encodes checksums as the contents of the file."""
    entries = {
        name: {
            "shape": list(sums.shape),
            "dtype": sums.dtype,
            "boxes": [[edge for side in box for edge in side] for box in sums.boxes],
            "crc32c": list(sums.crcs),
        }
        for name, sums in leaves.items()
    }
    return _compact({"version": _VERSION, "leaves": entries, "crc32c": CRC32C.extend(0, _compact(entries))})


def _compact(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def parse_checksums(data: bytes, path: str, limits: Limits) -> dict[str, BoxSums]:
    """Parses a file of checksums by the leaves' stored keys."""
    parsed = parse_object(data, path)
    version = parsed.get("version")
    if type(version) is int and version > _VERSION:
        raise UnsupportedCheckpointError(f"its version is {version}; this release reads {_VERSION}", path=path)
    leaves = parsed.get("leaves")
    if parsed.keys() != _KEYS or version != _VERSION or type(version) is not int or not isinstance(leaves, dict):
        raise CorruptCheckpointError("it is no object of version, leaves and crc32c", path=path)
    limits.require_entries(len(leaves), path)
    found = CRC32C.extend(0, _compact(leaves))
    if type(parsed["crc32c"]) is not int or parsed["crc32c"] != found:
        raise CorruptCheckpointError(
            f"its own checksum is {str(parsed['crc32c'])[:40]}, its contents have {found}; the file is damaged",
            path=path,
        )
    sums: dict[str, BoxSums] = {}
    for name, entry in leaves.items():
        try:
            sums[name] = _parse_sums(entry, limits)
        except (ValueError, TypeError, KeyError, SyntaxError) as fault:
            raise CorruptCheckpointError(f"the entry of {name[:200]!r}: {fault}", path=path) from None
    return sums


def _parse_sums(entry: Any, limits: Limits) -> BoxSums:
    """Parses an entry; raises ValueError, TypeError or KeyError if it is none."""
    shape, crcs, dtype = _numbers(entry["shape"]), _numbers(entry["crc32c"]), entry["dtype"]
    if dtype != STRING:
        limits.require_shape(shape, np.dtype(dtype))
    boxes = tuple([tuple(zip(edges[::2], edges[1::2], strict=True)) for edges in map(_numbers, entry["boxes"])])
    if not boxes or len(boxes) != len(crcs):
        raise ValueError("there is not one checksum for each box")
    for box in boxes:
        if not all(start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)):
            raise ValueError(f"{str(box)[:80]} is no box of an array of shape {list(shape)}")
    return BoxSums(shape, dtype, boxes, crcs)


def _numbers(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{str(values)[:80]} is no list of natural numbers")
    return tuple(values)


def string_checksums(value: bytes, sums: BoxSums | CheckpointError, path: str, leaf: str) -> Checksums:
    """Makes the checksums of a string, or of its error."""
    if isinstance(sums, CheckpointError):
        return UnusableChecksums(leaf, sums)
    return _StringChecksum(value, sums, path, leaf)


class _StringChecksum(Checksums):
    """Checksum of a whole string, compared for any part."""

    def __init__(self, value: bytes, sums: BoxSums, path: str, leaf: str):
        self._value, self._sums, self._path, self._leaf = value, sums, path, leaf

    async def verify(self, stats: ReadStats, ranges: Sequence[ChecksummedRange]) -> bool:
        found, stored = CRC32C.extend(0, self._value), self._sums.crcs[0]
        if found != stored or self._sums.shape:
            message = f"the string has the crc32c {found:#010x}, stored is {stored:#010x}; it is damaged"
            raise CorruptCheckpointError(message, path=self._path, leaf=self._leaf)
        return True
