"""GGUF checkpoints: a file, its parts, or their directory.

Boxes are read by byte range. Opening reads the header, nothing else. Names are llama.cpp's, dimensions are turned round
to NumPy's order. Of GGML's quantizations Q8_0 is read, as float32; a leaf in another one is listed and says which. The
format keeps no checksum.
"""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedCheckpointError,
    error_at,
)
from orbax_t5x.extras.gguf.header import GgufHeader, TensorEntry, read_header
from orbax_t5x.extras.gguf.q8_range import BLOCK_ELEMENTS, Q8Range
from orbax_t5x.files.interface import Files, StoredFile
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.places import files_at, open_directory_of
from orbax_t5x.files.strict_json import charge_parsed
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.hub_files import LFS_POINTER, PART, ModelFiles, parts_of, refuse_lfs_pointer
from orbax_t5x.readers.leaves import BrokenLeaf
from orbax_t5x.readers.ranges.byte_range import ByteRange, StoredRange
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf

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


def open_gguf(path: str | os.PathLike[str], *, limits: Limits) -> Checkpoint:
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
    opened = _GgufFiles(files, limits)
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
        header = read_header(file, self._limits)
        self._bytes += header.index_bytes
        if not self._metadata["files"]:
            charge_parsed(header.metadata, file.path)
            self._metadata = {**header.metadata, "version": header.version, "files": []}
        self._metadata["files"].append(name)
        for leaf, found in _tensor_leaves(header, file, self._limits).items():
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


def _tensor_leaves(header: GgufHeader, file: StoredFile, limits: Limits) -> dict[str, Leaf]:
    """Makes a file's leaves, broken if they overlap."""
    leaves: dict[str, Leaf] = {}
    position = 0
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.start):
        try:
            stored = _range(tensor, file, limits)
            if stored.nbytes and tensor.start < position:
                raise CorruptCheckpointError(f"its bytes at {tensor.start} overlap those of another tensor")
            if stored.nbytes and tensor.start + stored.nbytes > file.size:
                raise CorruptCheckpointError(
                    f"the file has {file.size} bytes, and the tensor ends at {tensor.start + stored.nbytes}"
                )
            position = max(position, tensor.start + stored.nbytes)
            leaves[tensor.name] = ByteRangeLeaf(tensor.name, stored)
        except CheckpointError as error:
            leaves[tensor.name] = BrokenLeaf(tensor.name, error_at(error, path=file.path, leaf=tensor.name))
    return leaves


def _range(tensor: TensorEntry, file: StoredFile, limits: Limits) -> StoredRange:
    if tensor.type in _DTYPES:
        limits.require_shape(tensor.shape, _DTYPES[tensor.type])
        return ByteRange(file, tensor.start, tensor.shape, _DTYPES[tensor.type])
    if tensor.type != _Q8_0:
        if tensor.type not in _QUANTIZATIONS:
            raise CorruptCheckpointError(f"its type {tensor.type} is none of GGML's")
        raise UnsupportedCheckpointError(
            f"it is quantized as {_QUANTIZATIONS[tensor.type]}; F32, F16, BF16 and Q8_0 are read: convert the file by "
            "llama-quantize --allow-requantize to one of these, or take the model that it was made of"
        )
    limits.require_shape(tensor.shape, _SINGLE)
    if not tensor.shape or tensor.shape[-1] % BLOCK_ELEMENTS:
        raise CorruptCheckpointError(f"Q8_0 of shape {list(tensor.shape)} has no whole blocks of {BLOCK_ELEMENTS}")
    return Q8Range(file, tensor.start, tensor.shape, _SINGLE)
