"""Safetensors checkpoints: a file or a directory of files.

With or without an index; boxes are read by byte range. Opening reads the headers and `config.json`, nothing else;
`_safetensors_header` proves them against the files' sizes. A name is in exactly one file: where an index names it, it
must be there. The files are plain files inside the directory, or blobs of the Hugging Face hub cache that a snapshot
links to. The format keeps no checksum.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from orbax_t5x.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedCheckpointError
from orbax_t5x.files.interface import Files, StoredFile
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.places import files_at, open_directory_of
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.hub_files import LFS_POINTER, PART, ModelFiles, parts_of, refuse_lfs_pointer, trainer_step
from orbax_t5x.readers.leaves import BrokenLeaf
from orbax_t5x.readers.ranges.byte_range import ByteRange
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf
from orbax_t5x.readers.safetensors.header import LENGTH_BYTES, Refusal, header_size, parse_header, require_end

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def open_safetensors(path: str | os.PathLike[str], *, limits: Limits) -> Checkpoint:
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
    opened = _SafetensorsFiles(files, limits)
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

    def __init__(self, root: Files, limits: Limits):
        super().__init__(root, limits)
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
        first = _head(file)
        refuse_lfs_pointer(first, file.path)
        size = header_size(first, file.known_size, file.path)
        data = file.read(LENGTH_BYTES, size)
        self._bytes += LENGTH_BYTES + size
        entries, metadata = parse_header(data, file.path, self._limits)
        del data
        require_end(entries, LENGTH_BYTES + size, file)
        self._metadata["files"].append(name)
        self._metadata["file_metadata"][name] = metadata
        self._claim([entry.name for entry in entries], name)
        entries.reverse()
        while entries:
            leaf, shape, start, _, dtype = entries.pop()  # so that none is kept in both forms
            if isinstance(dtype, Refusal):
                self._leaves[leaf] = BrokenLeaf(leaf, dtype.kind(dtype.message, path=file.path, leaf=leaf))
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


def _head(file: StoredFile) -> bytes:
    """Reads the first bytes of a file, as many as it has."""
    size = file.known_size
    try:
        return bytes(file.read(0, len(LFS_POINTER) if size is None else min(size, len(LFS_POINTER))))
    except CorruptCheckpointError:  # a remote file that is shorter
        return bytes(file.read(0, file.size))
