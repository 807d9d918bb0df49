"""Files of the Hugging Face hub that several formats share.

They are a model's configuration, the index of a model in several files, and pointers of Git LFS.
"""

from __future__ import annotations

import abc
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.interface import Files
from orbax_t5x.files.paths import split_name
from orbax_t5x.files.strict_json import parse_object
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.readers.checkpoint import Checkpoint

_CONFIG = "config.json"
# How the Hugging Face trainer names its steps.
_STEP_NAME = re.compile(r"checkpoint[-_](?P<step>[0-9]{1,18})", re.ASCII)
# A file of a model in several files; each program counts from 1.
PART = re.compile(
    r"(?P<model>.*)-(?P<number>[0-9]{5,})-of-(?P<parts>[0-9]{5,})(?P<suffix>\.[a-z]+)", re.ASCII | re.DOTALL
)
LFS_POINTER = b"version https://git-lfs"
"""The first bytes of a file that Git LFS has not fetched."""


def read_config(root: Files) -> Mapping[str, Any]:
    """Reads the model's configuration, or why it cannot be read."""
    try:
        if not root.exists(_CONFIG):
            return {"config": None}
        data = root.read_whole(_CONFIG, limit=root.limits.json_bytes, bound="Limits.json_bytes")
        return {"config": parse_object(data, root.join(_CONFIG), allow_nan=True)}
    except CheckpointNotFoundError:
        return {"config": None}
    except CheckpointError as error:
        return {"config": None, "config_error": str(error)}


def trainer_step(directory: str) -> int | None:
    """Parses the step in a Hugging Face trainer's directory name."""
    match = _STEP_NAME.fullmatch(os.path.basename(directory))
    return int(match["step"]) if match else None


def parts_of(name: str, files: Files) -> list[str]:
    """Lists the files of a part's model, or the whole file.

    Raises:
      CorruptCheckpointError: a part is missing.
    """
    part = PART.fullmatch(name)
    if part is None or not 0 < int(part["number"]) <= int(part["parts"]):
        return [name]
    width = len(part["number"])
    names = []
    for number in range(1, int(part["parts"]) + 1):
        names.append(f"{part['model']}-{number:0{width}}-of-{part['parts']}{part['suffix']}")
        if names[-1] != name and not files.exists(names[-1]):
            raise CorruptCheckpointError(
                f"one of {int(part['parts'])} parts of a model, and {names[-1]!r} is missing", path=files.join(name)
            )
    return names


def refuse_lfs_pointer(first: bytes, path: str) -> None:
    """Raises if a file's first bytes are a Git LFS pointer."""
    if first.startswith(LFS_POINTER):
        message = "a Git LFS pointer, not the file itself: run `git lfs pull` where it was cloned"
        raise UnsupportedCheckpointError(message, path=path)


class ModelFiles(abc.ABC):
    """Files of a model during its opening.

    A leaf is in exactly one file.

    Attributes:
      format: the name of the checkpoint's format.
      suffix: what the names of files with leaves end with.
    """

    format: ClassVar[str]
    suffix: ClassVar[str]

    def __init__(self, root: Files):
        self._root = root
        self._leaves: dict[str, Leaf] = {}
        self._empties: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._metadata: dict[str, Any] = {"files": []}
        self._bytes = 0

    @abc.abstractmethod
    def add_file(self, name: str) -> None:
        """Adds all leaves of a file."""

    def add_config(self, store: Files) -> None:
        """Adds the model's configuration, if it is beside the files."""
        self._metadata.update(read_config(store))

    def add_index(self, index: str) -> None:
        """Adds all files that an index names."""
        path = self._root.join(index)
        file_of = self._read_index(index, path)
        for name in sorted(set(file_of.values())):
            try:
                self.add_file(name)
            except CheckpointNotFoundError:
                raise CorruptCheckpointError(
                    f"the file {name!r}, which the index names, is missing", path=path
                ) from None
        for leaf, file in file_of.items():
            if self._file_of.get(leaf, file) != file:
                message = f"the index puts it into {file!r}, and it is in {self._file_of[leaf]!r}"
                raise CorruptCheckpointError(message, path=path, leaf=leaf)
        # The hub's converter drops tensors that share a storage from the files and keeps their names in the index.
        if index_only := sorted(file_of.keys() - self._file_of.keys()):
            self._metadata["index_only"] = index_only

    def checkpoint(self, path: str, step: int | None) -> Checkpoint:
        """Makes the checkpoint."""
        self._file_of.clear()
        return Checkpoint(
            path=path,
            format=self.format,
            step=step,
            leaves=self._leaves,
            empties=self._empties,
            metadata=self._metadata,
            close=self._root.close,
            index_bytes=self._bytes,
        )

    def _claim(self, leaves: Iterable[str], file: str) -> None:
        """Records the file of leaves."""
        for leaf in leaves:
            if (first := self._file_of.setdefault(leaf, file)) != file:
                message = f"is in {first!r} and in {file!r}; open one of them by its path"
                raise CorruptCheckpointError(message, path=self._root.path, leaf=leaf)

    def _read_index(self, index: str, path: str) -> Mapping[str, str]:
        """Reads an index into file names by leaf."""
        data = self._root.read_whole(index, limit=self._root.limits.index_bytes)
        refuse_lfs_pointer(data, path)
        parsed = parse_object(data, path)
        file_of = parsed.get("weight_map")
        if not isinstance(file_of, dict):
            raise CorruptCheckpointError("'weight_map' is missing or not an object", path=path)
        for leaf, file in file_of.items():
            _check_file(leaf, file, self.suffix, path)
        self._bytes += len(data)
        self._metadata["index"] = parsed.get("metadata")
        return file_of


def _check_file(leaf: str, file: Any, suffix: str, path: str) -> None:
    """Proves that an index names a file in its own directory."""
    if not isinstance(file, str) or not file.endswith(suffix):
        raise CorruptCheckpointError(
            f"the index names {str(file)[:200]!r} for it, not a {suffix} file", path=path, leaf=leaf
        )
    if "://" in file:
        raise UnsafeCheckpointError(f"the index names the URL {file[:200]!r} for it", path=path, leaf=leaf)
    split_name(file, path=path, leaf=leaf)
