"""Safetensors files as Transformers saves a model.

The layout is planned first, then bytes are written. A model of up to `MAX_FILE_BYTES` is `model.safetensors`; a larger
one is `model-00001-of-0000N.safetensors` and so on, with an index that maps each tensor to its file. Tensors are taken
in order of their names; within a file those of wide dtypes come first, as the format's own library writes them, so that
each is aligned. The layout is pure geometry; the files get their full size, and the blocks of a tensor are then written
in any order.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orbax_t5x.concurrency import await_to_end, reader_pool, run_in_pool
from orbax_t5x.lazy import Box, ReadStats
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf
from orbax_t5x.readers.ranges.windowed import union_runs
from orbax_t5x.readers.safetensors.open import DTYPES, LENGTH_BYTES, METADATA_KEY

# Transformers' own bound was 5 GB for years: hubs, and file systems with small limits, take files of this size.
MAX_FILE_BYTES = 5_000_000_000
# Transformers refuses files without the name of a library.
_METADATA = {"format": "pt"}
_ALIGNMENT = 8
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Tensor(NamedTuple):
    """Name, shape and dtype of an array in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


class PlannedFile(NamedTuple):
    """A file: its `head` and its tensors' first bytes.

    `head` is before the first tensor, `starts` count from the file's beginning.
    """

    name: str
    head: bytes
    starts: Mapping[str, int]
    size: int


def unsupported_reason(name: str, dtype: np.dtype) -> str | None:
    """Returns why the format cannot hold an array, or None."""
    if name == METADATA_KEY:
        return "has the name that the format keeps for its own metadata"
    if any("\ud800" <= char <= "\udfff" for char in name):
        return "has a name that is no Unicode text"
    if dtype.hasobject:
        return "holds text"
    return None if dtype in _CODES else f"has a dtype that the format does not know ({dtype.name})"


def plan_files(tensors: Sequence[Tensor], max_bytes: int = MAX_FILE_BYTES) -> list[PlannedFile]:
    """Plans the fewest files that hold a model."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in sorted(tensors):
        if groups[-1] and size + tensor.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return [_planned(SINGLE_NAME, groups[0])]
    return [
        _planned(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    ]


def _planned(name: str, tensors: Sequence[Tensor]) -> PlannedFile:
    header: dict[str, object] = {METADATA_KEY: _METADATA}
    begins: dict[str, int] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name)):
        begins[tensor.name] = end
        end += tensor.nbytes
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[tensor.name], end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(LENGTH_BYTES, "little") + text
    starts = {name: len(head) + begin for name, begin in begins.items()}
    return PlannedFile(name, head, starts, len(head) + end)


def index_of(files: Sequence[PlannedFile], tensors: Sequence[Tensor]) -> bytes:
    """Encodes the index of several files."""
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
            "total_size": sum(tensor.nbytes for tensor in tensors),
        },
        "weight_map": {name: file.name for file in files for name in file.starts},
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def create(file: PlannedFile, directory: Path) -> Path:
    """Makes a file with its header and its full size."""
    path = directory / file.name
    with path.open("xb") as opened:
        opened.write(file.head)
        opened.truncate(file.size)
    return path


class TensorInFile:
    """Tensor in a file that `create` has made."""

    def __init__(self, path: Path, start: int, tensor: Tensor):
        self._path = path
        self._start = start
        self._tensor = tensor

    async def write(self, box: Box, data: np.ndarray) -> None:
        """Writes a box; see `handlers.stream.BlockOutput`."""
        await await_to_end(run_in_pool(reader_pool(), self._write, box, data))

    def _write(self, box: Box, data: np.ndarray) -> None:
        stored = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        file = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            for position, run in self._runs(box, stored):
                _write_all(file, run, position)
        finally:
            os.close(file)

    async def copy(self, box: Box, leaf: ByteRangeLeaf, stats: ReadStats) -> int | None:
        """Copies a box from a leaf, and returns its crc32c."""
        return await await_to_end(run_in_pool(reader_pool(), self._copy, box, leaf, stats))

    def _copy(self, box: Box, leaf: ByteRangeLeaf, stats: ReadStats) -> int | None:
        file = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            return leaf.copy_blocking(box, lambda start, data: _write_all(file, data.data, self._start + start), stats)
        finally:
            os.close(file)

    def _runs(self, box: Box, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yields the file positions of a box with runs of `data`."""
        runs, _ = union_runs(self._tensor.shape, self._tensor.dtype.itemsize, [box], 0)
        done = 0
        for run in runs:
            for start, stop in run.ranges():
                yield self._start + start, data[done : done + stop - start]
                done += stop - start


def _write_all(file: int, data: memoryview, position: int) -> None:
    """Writes all of `data`; `os.pwrite` may write less."""
    while data:
        written = os.pwrite(file, data, position)
        data = data[written:]
        position += written
