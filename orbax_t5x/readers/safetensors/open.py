"""Safetensors checkpoints: a file or a directory of files.

With or without an index; boxes are read by byte range. Opening reads the headers and `config.json`, nothing else. A
header is an 8-byte little-endian length and that many bytes of JSON; the tensors' byte ranges follow one another from
it to the end of the file without holes or overlaps, each as long as its shape and dtype require, so a proven header
cannot make a reader leave the file, read bytes twice or miss some. A name is in exactly one file: where an index names
it, it must be there. The files are plain files inside the directory, or blobs of the Hugging Face hub cache that a
snapshot links to. The format keeps no checksum.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsupportedCheckpointError,
    error_at,
)
from orbax_t5x.files.interface import Files, StoredFile
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.places import files_at, open_directory_of, within_limits
from orbax_t5x.files.strict_json import parse_object
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.hub_files import LFS_POINTER, PART, ModelFiles, parts_of, refuse_lfs_pointer, trainer_step
from orbax_t5x.readers.leaves import BrokenLeaf
from orbax_t5x.readers.ranges.byte_range import ByteRange
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf

LENGTH_BYTES = 8
METADATA_KEY = "__metadata__"
_MAX_INT = 2**63 - 1

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        **{"BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32},
        **{"I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "BF16": ml_dtypes.bfloat16},
        **{"F32": np.float32, "F64": np.float64, "C64": np.complex64, "F8_E4M3": ml_dtypes.float8_e4m3fn},
        **{"F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2": ml_dtypes.float8_e5m2},
        **{"F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz, "F8_E8M0": ml_dtypes.float8_e8m0fnu},
    }.items()
}
# Several elements share a byte; NumPy has no such arrays.
_PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class Entry(NamedTuple):
    """A tensor: its bytes are [start, stop) of the file; an error stands for a dtype that is not read."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    dtype: np.dtype | CheckpointError


def header_size(first: bytes | bytearray, file: StoredFile) -> int:
    """Reads the length of the JSON from the first 8 bytes."""
    if len(first) < LENGTH_BYTES:
        raise CorruptCheckpointError(f"{len(first)} bytes are too few for a safetensors file", path=file.path)
    size, most = int.from_bytes(first[:LENGTH_BYTES], "little"), file.limits.header_bytes
    if size > file.size - LENGTH_BYTES:
        message = f"the header claims {size} bytes; the file has {file.size}"
        raise CorruptCheckpointError(message, path=file.path)
    if size > most:
        message = f"the header claims {size} bytes, more than Limits.header_bytes = {most}"
        raise LimitExceededError(message, path=file.path)
    return size


def parse_header(data: bytes | bytearray, file: StoredFile) -> tuple[list[Entry], dict[str, str]]:
    """Parses the tensors of a file, and its `__metadata__`."""
    path, limits = file.path, file.limits
    if not data.startswith(b"{"):
        raise CorruptCheckpointError(f"the header begins with {bytes(data[:8])!r}, not with '{{'", path=path)
    parsed = parse_object(data, path)
    metadata = _parse_metadata(parsed.pop(METADATA_KEY, {}), path)
    limits.require_entries(len(parsed), path)
    begin = LENGTH_BYTES + len(data)
    # Millions of entries: none is kept in both forms.
    entries = [_parse_entry(name, parsed.pop(name), begin, path, limits) for name in list(parsed)]
    entries.sort(key=operator.attrgetter("start", "stop"))
    position = begin
    for entry in entries:
        if entry.start != position:
            what = "overlaps the one before" if entry.start < position else "leaves a hole before it"
            raise CorruptCheckpointError(
                f"its bytes [{entry.start - begin}, {entry.stop - begin}) {what}, which ends at {position - begin}",
                path=path,
                leaf=entry.name,
            )
        position = entry.stop
    return entries, metadata


def require_end(entries: Sequence[Entry], begin: int, file: StoredFile) -> None:
    """Proves that a file ends with its last tensor."""
    end = entries[-1].stop if entries else begin
    if file.size != end:
        raise CorruptCheckpointError(f"the tensors end at byte {end}, and the file at byte {file.size}", path=file.path)


def _parse_metadata(metadata: Any, path: str) -> dict[str, str]:
    if metadata is None:  # the format's own library takes null for no metadata
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptCheckpointError(f"{METADATA_KEY} is not an object of strings", path=path)
    return metadata


def _parse_entry(name: str, entry: Any, begin: int, path: str, limits: Limits) -> Entry:
    limits.require_name(name, path)
    try:
        code, shape, low, high = _parse_fields(entry)
        if high < low:
            raise _no_range([low, high])
        return Entry(name, shape, begin + low, begin + high, _dtype(code, shape, high - low, limits))
    except CheckpointError as error:
        raise error_at(error, path=path, leaf=name) from None


def _parse_fields(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Parses the three fields of an entry."""
    if not isinstance(entry, dict) or not isinstance(code := entry.get("dtype"), str):
        raise CorruptCheckpointError("its entry has no dtype")
    shape, offsets = (_sizes(entry.get(key), key) for key in ("shape", "data_offsets"))
    if len(offsets) != 2:
        raise _no_range(offsets)
    return code, tuple(shape), offsets[0], offsets[1]


def _sizes(value: Any, key: str) -> list[int]:
    if type(value) is not list or any(type(size) is not int or not 0 <= size <= _MAX_INT for size in value):
        raise CorruptCheckpointError(f"{key} is {str(value)[:200]}, not a list of sizes")
    return value


def _no_range(offsets: list[int]) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"data_offsets are {offsets}, not a begin and an end")


def _dtype(code: str, shape: tuple[int, ...], size: int, limits: Limits) -> np.dtype | CheckpointError:
    """Returns the dtype, or why it is refused."""
    limits.require_rank(len(shape))
    count = math.prod(shape)
    bits = _PACKED_BITS.get(code) or (DTYPES[code].itemsize * 8 if code in DTYPES else None)
    if bits is None:
        return UnsupportedCheckpointError(f"its dtype {code[:100]!r} is not known")
    if count * bits != size * 8:
        raise CorruptCheckpointError(
            f"{code} of shape {list(shape)} takes {count * bits / 8:g} bytes, and its range has {size}"
        )
    if code in _PACKED_BITS:
        return UnsupportedCheckpointError(f"its dtype {code} packs elements of {bits} bits")
    try:
        limits.require_shape(shape, DTYPES[code])
    except CheckpointError as error:
        return error
    return DTYPES[code]


SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@within_limits
def open_safetensors(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a local `.safetensors` file, a `.safetensors.index.json`, or a directory with either."""
    given = files_at(os.fspath(path))
    path, is_directory = given.named, given.is_directory()
    directory = given if is_directory else files_at(os.path.dirname(path))
    name = "" if is_directory else os.path.basename(path)
    files = directory
    if "-of-" in name:
        parts_of(name, directory)
    if given.is_link() and not is_directory and not name.endswith(INDEX_SUFFIX):
        files, name = open_directory_of(path)
    opened = _SafetensorsFiles(files)
    if is_directory:
        opened.add_directory()
    elif name.endswith(INDEX_SUFFIX):
        opened.add_index(name)
    else:
        opened.add_file(name)
    opened.add_config(directory)
    return opened.checkpoint(path, trainer_step(directory.named))


class _SafetensorsFiles(ModelFiles):
    """Safetensors files of a model."""

    format = "safetensors"
    suffix = SUFFIX

    def __init__(self, root: Files):
        super().__init__(root)
        self._metadata["file_metadata"] = {}

    def add_directory(self) -> None:
        """Adds a directory's only model file, its index's files, or all."""
        names = self._root.names()
        indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
        files = [name for name in names if name.endswith(SUFFIX)]
        if SINGLE_FILE in files:
            self.add_file(SINGLE_FILE)
        elif INDEX_FILE in indexes or len(indexes) == 1:
            self.add_index(INDEX_FILE if INDEX_FILE in indexes else indexes[0])
        elif indexes:
            raise UnsupportedCheckpointError(f"several indexes: open one of {', '.join(indexes)}", path=self._root.path)
        elif files:
            _check_shards(files, self._root.path)
            for name in files:
                self.add_file(name)
        else:
            raise CheckpointNotFoundError("no safetensors files in this directory", path=self._root.path)

    def add_file(self, name: str) -> None:
        file = self._root.file(name)
        first = bytes(file.read(0, min(file.size, len(LFS_POINTER))))
        refuse_lfs_pointer(first, file.path)
        size = header_size(first, file)
        data = file.read(LENGTH_BYTES, size)
        self._bytes += LENGTH_BYTES + size
        entries, metadata = parse_header(data, file)
        del data
        require_end(entries, LENGTH_BYTES + size, file)
        self._metadata["files"].append(name)
        self._metadata["file_metadata"][name] = metadata
        self._claim([entry.name for entry in entries], name)
        entries.reverse()
        while entries:
            leaf, shape, start, _, dtype = entries.pop()  # so that none is kept in both forms
            if isinstance(dtype, CheckpointError):
                self._leaves[leaf] = BrokenLeaf(leaf, dtype, file.path)
            else:
                self._leaves[leaf] = ByteRangeLeaf(leaf, ByteRange(file, start, shape, dtype))


def _check_shards(files: Sequence[str], path: str) -> None:
    """Refuses an incomplete set of numbered files without an index."""
    shards = [match for name in files if (match := PART.fullmatch(name))]
    sets = sorted({(match["model"], match["parts"]) for match in shards})
    if len(sets) > 1:
        names = ", ".join(f"{stem}-…-of-{count}{SUFFIX}" for stem, count in sets)
        raise CorruptCheckpointError(f"files of several models without an index: {names}", path=path)
    if shards and len(shards) != int(sets[0][1]):
        message = f"{len(shards)} of {int(sets[0][1])} files of a model are there, and no index"
        raise CorruptCheckpointError(message, path=path)
