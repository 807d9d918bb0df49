"""GGUF checkpoints: a file, its parts, or their directory.

Boxes are read by byte range. Opening reads the header, nothing else. Names are llama.cpp's, dimensions are turned round
to NumPy's order. Of GGML's quantizations Q8_0 is read, as float32, a slab of the array at a time; a leaf in another one
is listed and says which. The format keeps no checksum.
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
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
from orbax_t5x.files.places import files_at, open_directory_of, within_limits
from orbax_t5x.lazy.box import Box, box_shape, box_size
from orbax_t5x.lazy.leaf import Leaf, Request
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.hub_files import LFS_POINTER, PART, ModelFiles, parts_of, refuse_lfs_pointer
from orbax_t5x.readers.leaves import BrokenLeaf
from orbax_t5x.readers.ranges.byte_range import ByteRange, ReadOutcome, StoredRange
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf
from orbax_t5x.readers.ranges.window_reader import WindowReader

BLOCK_ELEMENTS = 32
_SCALE_BYTES = 2
_BLOCK = np.dtype(f"V{_SCALE_BYTES + BLOCK_ELEMENTS}")
# Of blocks in memory at a time; as float32 they take four times as much.
_SLAB_BYTES = 2 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Q8Range(StoredRange):
    """A row-major array of blocks.

    Readers have proven that the last dimension is a multiple of 32.
    """

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // BLOCK_ELEMENTS * _BLOCK.itemsize

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        return self._blocks().bytes_of(tuple([_in_blocks(box) for box in boxes if box_size(box)]))

    def read(self, requests: Sequence[Request], *, checksum: bool, leaf: str) -> ReadOutcome:
        for box, out in requests:
            if box_shape(box) != out.shape or out.dtype != self.dtype:
                raise ValueError(f"{leaf}: a buffer of {out.dtype} {out.shape} for {box} of {self.dtype}")
        stored = self._blocks()
        wanted = gaps = 0
        for some in _slabs(stored.shape, [request for request in requests if request.out.size]):
            boxes = [_in_blocks(box) for box, _ in some]
            blocks = [Request(box, np.empty(box_shape(box), _BLOCK)) for box in boxes]
            outcome = stored.read(blocks, checksum=False, leaf=leaf)
            wanted, gaps = wanted + outcome.wanted, gaps + outcome.gaps
            for request, block in zip(some, blocks, strict=True):
                _dequantize(block.out, request)
        return ReadOutcome([], wanted, gaps)

    def sum(self, ranges: Iterable[tuple[int, int]], *, leaf: str) -> ReadOutcome:
        return self._blocks().sum(ranges, leaf=leaf)

    def _blocks(self) -> ByteRange:
        return ByteRange(self.file, self.offset, (*self.shape[:-1], self.shape[-1] // BLOCK_ELEMENTS), _BLOCK)


def _in_blocks(box: Box) -> Box:
    """Returns the box of blocks that hold a box of elements."""
    low, high = box[-1]
    return (*box[:-1], (low // BLOCK_ELEMENTS, -(-high // BLOCK_ELEMENTS)))


def _slabs(shape: tuple[int, ...], requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Yields the requests cut along the longest dimension.

    It is that of the array of blocks; no slab takes too much.
    """
    size = sum([box_size(_in_blocks(box)) for box, _ in requests]) * _BLOCK.itemsize
    if size <= _SLAB_BYTES:
        if requests:
            yield list(requests)
        return
    axis = int(np.argmax(shape))
    unit = BLOCK_ELEMENTS if axis == len(shape) - 1 else 1
    step = max(1, shape[axis] * _SLAB_BYTES // size)
    for start in range(0, shape[axis], step):
        if some := [part for one in requests if (part := _cut_request(one, axis, start * unit, (start + step) * unit))]:
            yield some


def _cut_request(request: Request, axis: int, low: int, high: int) -> Request | None:
    """Cuts a request to a range, or returns None."""
    box, out = request
    first, last = max(box[axis][0], low), min(box[axis][1], high)
    if first >= last:
        return None
    index = (*[slice(None)] * axis, slice(first - box[axis][0], last - box[axis][0]))
    return Request((*box[:axis], (first, last), *box[axis + 1 :]), out[index])


def _dequantize(blocks: np.ndarray, request: Request) -> None:
    """Fills a buffer with the elements of its blocks."""
    box, out = request
    stored = blocks.view(np.uint8).reshape(*blocks.shape, _BLOCK.itemsize)
    scales = np.ascontiguousarray(stored[..., :_SCALE_BYTES]).view("<f2").astype(np.float32)
    with np.errstate(all="ignore"):  # a scale may be no number
        values = stored[..., _SCALE_BYTES:].view(np.int8) * scales
    start = box[-1][0] % BLOCK_ELEMENTS
    out[...] = values.reshape(*blocks.shape[:-1], -1)[..., start : start + out.shape[-1]]


MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# The most dimensions that GGML's tensors have.
_MOST_DIMENSIONS = 4
_ALIGNMENT_KEY = "general.alignment"
_ALIGNMENT = 32
_LARGEST_ALIGNMENT = 1 << 20
# The fewest bytes of a key-value pair, and of a tensor's entry.
_PAIR_BYTES, _TENSOR_BYTES = 13, 24
# By the code of a value's type.
_NUMBERS = {code: np.dtype(name) for code, name in enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))}
_NUMBERS |= {10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")}
_TEXT, _ARRAY = 8, 9
# Longer arrays and texts are described instead: they are tokenizers and templates.
_KEPT_VALUES, _KEPT_TEXT_BYTES = 256, 1 << 16


class TensorEntry(NamedTuple):
    """Entry of a tensor."""

    name: str
    shape: tuple[int, ...]
    type: int
    start: int


class GgufHeader(NamedTuple):
    """A parsed header; parsing read `index_bytes`."""

    version: int
    metadata: dict[str, Any]
    tensors: list[TensorEntry]
    index_bytes: int


def read_header(file: StoredFile) -> GgufHeader:
    """Parses the header of a file; `metadata` are its key-value pairs."""
    return _HeaderParser(file).run()


class _HeaderParser:
    def __init__(self, file: StoredFile):
        self._file = file
        self._limits = file.limits
        self._reader = WindowReader(file)
        self._values = 0

    def run(self) -> GgufHeader:
        reader = self._reader
        if reader.left < len(MAGIC) or reader.take(len(MAGIC)) != MAGIC:
            raise reader.corrupt("the file does not begin with 'GGUF'")
        version = self._number("<I")
        if version not in _VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            raise UnsupportedCheckpointError(
                "a GGUF file of the other byte order (big-endian), which is not read"
                if is_swapped
                else f"version {version} of GGUF; versions 2 and 3 are read",
                path=self._file.path,
            )
        tensors = self._count("tensors", self._number("<Q"), _TENSOR_BYTES)
        pairs = self._count("key-value pairs", self._number("<Q"), _PAIR_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text("a key")
            if key in metadata:
                raise reader.corrupt(f"the key {key[:200]!r} occurs twice")
            metadata[key] = self._value(self._number("<I"), 0)
            self._require_header_bytes()
        entries: dict[str, TensorEntry] = {}
        for _ in range(tensors):
            tensor = self._tensor()
            if tensor.name in entries:
                raise CorruptCheckpointError("two tensors have this name", path=self._file.path, leaf=tensor.name)
            entries[tensor.name] = tensor
            self._require_header_bytes()
        placed = self._placed(list(entries.values()), self._alignment(metadata))
        return GgufHeader(version, metadata, placed, reader.bytes_read)

    def _require_header_bytes(self) -> None:
        if self._reader.position > self._limits.index_bytes:
            raise LimitExceededError(
                f"the header has more than Limits.index_bytes = {self._limits.index_bytes} bytes", path=self._file.path
            )

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get(_ALIGNMENT_KEY, _ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= _LARGEST_ALIGNMENT:
            raise self._reader.corrupt(f"{_ALIGNMENT_KEY} is {str(alignment)[:200]}")
        return alignment

    def _placed(self, tensors: list[TensorEntry], alignment: int) -> list[TensorEntry]:
        """Returns the tensors with offsets from the file's beginning."""
        begin = -(-self._reader.position // alignment) * alignment
        for tensor in tensors:
            if tensor.start % alignment:
                raise CorruptCheckpointError(
                    f"its offset {tensor.start} is no multiple of the alignment {alignment}",
                    path=self._file.path,
                    leaf=tensor.name,
                )
        return [tensor._replace(start=begin + tensor.start) for tensor in tensors]

    def _tensor(self) -> TensorEntry:
        name = self._text("the name of a tensor")
        self._limits.require_name(name, self._file.path)
        try:
            rank = self._number("<I")
            if rank > _MOST_DIMENSIONS:
                raise self._reader.corrupt(f"{rank} dimensions; GGML's tensors have {_MOST_DIMENSIONS} at most")
            sizes = [self._number("<Q") for _ in range(rank)]
            type_code = self._number("<I")
            offset = self._number("<Q")
        except CheckpointError as error:
            raise error_at(error, path=self._file.path, leaf=name) from None
        return TensorEntry(name, tuple(reversed(sizes)), type_code, offset)

    # -- values

    def _number(self, form: str) -> int:
        return struct.unpack(form, self._reader.take(struct.calcsize(form)))[0]

    def _count(self, what: str, count: int, least_bytes: int) -> int:
        """Returns a count of entries, proven to fit."""
        if count * least_bytes > self._reader.left:
            raise self._reader.corrupt(f"{count} {what} in the {self._reader.left} bytes that are left")
        self._limits.require_entries(count, self._file.path)
        return count

    def _text_size(self, what: str) -> int:
        size = self._number("<Q")
        if size > self._reader.left:
            raise self._reader.corrupt(f"{what} of {size} bytes, and {self._reader.left} are left")
        return size

    def _text(self, what: str) -> str:
        size = self._text_size(what)
        try:
            return self._reader.take(size).decode()
        except UnicodeDecodeError:
            raise self._reader.corrupt(f"{what} is not UTF-8") from None

    def _value(self, code: int, depth: int) -> Any:
        """Reads a value; a long text or array is described instead."""
        self._values += 1
        self._limits.require_entries(self._values, self._file.path)
        if code in _NUMBERS:
            return self._numbers(_NUMBERS[code], 1)[0]
        if code == _TEXT:
            size = self._text_size("a text")
            if size > _KEPT_TEXT_BYTES:
                self._reader.skip(size)
                return f"(a text of {size} bytes)"
            return self._reader.take(size).decode(errors="replace")
        if code == _ARRAY:
            return self._array(depth + 1)
        raise self._reader.corrupt(f"a value of the unknown type {code}")

    def _array(self, depth: int) -> Any:
        if depth > self._limits.nesting:
            message = f"arrays nested deeper than Limits.nesting = {self._limits.nesting}"
            raise LimitExceededError(message, path=self._file.path)
        code, count = self._number("<I"), self._number("<Q")
        if code in _NUMBERS:
            size = _NUMBERS[code].itemsize
            if count * size > self._reader.left:
                raise self._reader.corrupt(f"an array of {count} numbers in the {self._reader.left} bytes left")
            if count <= _KEPT_VALUES:
                return self._numbers(_NUMBERS[code], count)
            self._reader.skip(count * size)
        elif code == _TEXT and count > _KEPT_VALUES:
            self._skip_texts(self._count("texts", count, 8))
        elif code in (_TEXT, _ARRAY) and count <= _KEPT_VALUES:
            return [self._value(code, depth) for _ in range(count)]
        else:
            raise self._reader.corrupt(f"an array of {count} values of the type {code}")
        return f"(an array of {count} values)"

    def _numbers(self, dtype: np.dtype, count: int) -> list[Any]:
        values = np.frombuffer(self._reader.take(count * dtype.itemsize), np.uint8 if dtype.kind == "b" else dtype)
        if dtype.kind == "b" and count and int(values.max()) > 1:
            raise self._reader.corrupt("a bool that is neither 0 nor 1")
        return values.astype(dtype).tolist()

    def _skip_texts(self, count: int) -> None:
        self._values += count
        self._limits.require_entries(self._values, self._file.path)
        for _ in range(count):
            self._reader.skip(self._text_size("a text"))


SUFFIX = ".gguf"
_SINGLE = np.dtype(np.float32)
# GGML's types by their codes: those that are read, then quantizations.
_DTYPES = {0: _SINGLE, 1: np.dtype(np.float16), 30: np.dtype(ml_dtypes.bfloat16), 28: np.dtype(np.float64)}
_DTYPES |= {24: np.dtype(np.int8), 25: np.dtype(np.int16), 26: np.dtype(np.int32), 27: np.dtype(np.int64)}
_Q8_0 = 8
_QUANTIZATIONS = {
    **{2: "Q4_0", 3: "Q4_1", 4: "Q4_2", 5: "Q4_3", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K"},
    **{12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8"},
    **{33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
    **{39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}


@within_limits
def open_gguf(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a file, or a directory with a file or its parts."""
    given = files_at(os.fspath(path))
    if given.is_directory():
        files, names = given, _files_in(given)
    else:
        files, name = open_directory_of(given.named)
        names = [name]
        if PART.fullmatch(os.path.basename(given.named)):
            files = files_at(os.path.dirname(given.named))
            names = parts_of(os.path.basename(given.named), files)
    opened = _GgufFiles(files)
    for name in names:
        opened.add_file(name)
    return opened.checkpoint(given.named, None)


class _GgufFiles(ModelFiles):
    """GGUF files of a model; metadata are the first file's."""

    format = "gguf"
    suffix = SUFFIX

    def add_file(self, name: str) -> None:
        file = self._root.file(name)
        refuse_lfs_pointer(bytes(file.read(0, min(file.size, len(LFS_POINTER)))), file.path)
        header = read_header(file)
        self._bytes += header.index_bytes
        if not self._metadata["files"]:
            self._metadata = {**header.metadata, "version": header.version, "files": []}
        self._metadata["files"].append(name)
        for leaf, found in _tensor_leaves(header, file).items():
            self._claim((leaf,), name)
            self._leaves[leaf] = found


def _files_in(files: Files) -> list[str]:
    """Returns a directory's only file, or its only model's parts."""
    names = sorted(name for name in files.names() if name.endswith(SUFFIX))
    if not names:
        raise CheckpointNotFoundError("no GGUF files in this directory", path=files.named)
    parts = [PART.fullmatch(name) for name in names]
    models = {name if part is None else (part["model"], part["parts"]) for name, part in zip(names, parts, strict=True)}
    if len(models) > 1:
        raise UnsupportedCheckpointError(f"several GGUF files: open one of {', '.join(names)}", path=files.named)
    if (part := parts[0]) and int(part["parts"]) != len(names):
        raise CorruptCheckpointError(f"{len(names)} of the {int(part['parts'])} parts are here", path=files.named)
    return names


def _tensor_leaves(header: GgufHeader, file: StoredFile) -> dict[str, Leaf]:
    """Makes a file's leaves, broken if they overlap."""
    leaves: dict[str, Leaf] = {}
    position = 0
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.start):
        try:
            stored = _range(tensor, file)
            if stored.nbytes and tensor.start < position:
                raise CorruptCheckpointError(f"its bytes at {tensor.start} overlap those of another tensor")
            if stored.nbytes and tensor.start + stored.nbytes > file.size:
                raise CorruptCheckpointError(
                    f"the file has {file.size} bytes, and the tensor ends at {tensor.start + stored.nbytes}"
                )
            position = max(position, tensor.start + stored.nbytes)
            leaves[tensor.name] = ByteRangeLeaf(tensor.name, stored)
        except CheckpointError as error:
            leaves[tensor.name] = BrokenLeaf(tensor.name, error, file.path)
    return leaves


def _range(tensor: TensorEntry, file: StoredFile) -> StoredRange:
    if tensor.type in _DTYPES:
        file.limits.require_shape(tensor.shape, _DTYPES[tensor.type])
        return ByteRange(file, tensor.start, tensor.shape, _DTYPES[tensor.type])
    if tensor.type != _Q8_0:
        if tensor.type not in _QUANTIZATIONS:
            raise CorruptCheckpointError(f"its type {tensor.type} is none of GGML's")
        raise UnsupportedCheckpointError(
            f"it is quantized as {_QUANTIZATIONS[tensor.type]}; F32, F16, BF16 and Q8_0 are read: convert the file by "
            "llama-quantize --allow-requantize to one of these, or take the model that it was made of"
        )
    file.limits.require_shape(tensor.shape, _SINGLE)
    if not tensor.shape or tensor.shape[-1] % BLOCK_ELEMENTS:
        raise CorruptCheckpointError(f"Q8_0 of shape {list(tensor.shape)} has no whole blocks of {BLOCK_ELEMENTS}")
    return Q8Range(file, tensor.start, tensor.shape, _SINGLE)
