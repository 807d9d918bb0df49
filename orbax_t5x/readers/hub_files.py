"""Files of the Hugging Face hub that several formats share: a model's configuration, the index of a model in several
files, and pointers of Git LFS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.storage.limits import Limits
from orbax_t5x.storage.paths import split_name
from orbax_t5x.storage.store import Store
from orbax_t5x.storage.strict_json import parse_object, read_small

_CONFIG = "config.json"
LFS_POINTER = b"version https://git-lfs"
"""The first bytes of a file that Git LFS has not fetched."""


def read_config(root: Store, limits: Limits) -> Mapping[str, Any]:
    """Reads the model's configuration, or the reason why it cannot be read; the arrays do not need it."""
    try:
        data = read_small(root, _CONFIG, limit=limits.json_bytes, bound="Limits.json_bytes")
        return {"config": parse_object(data, root.join(_CONFIG), allow_nan=True)}
    except CheckpointNotFoundError:
        return {"config": None}
    except CheckpointError as error:
        return {"config": None, "config_error": str(error)}


def refuse_lfs_pointer(first: bytes, path: str) -> None:
    """Raises if a file that begins with these bytes is a pointer to the file itself."""
    if first.startswith(LFS_POINTER):
        message = "a Git LFS pointer, not the file itself: run `git lfs pull` where it was cloned"
        raise UnsupportedCheckpointError(message, path=path)


@dataclasses.dataclass(frozen=True)
class WeightMap:
    """Index of a model in several files.

    Attributes:
      path: of the index.
      file_of: the file of each leaf, in the index's own directory.
      metadata: what the index says about the model.
      index_bytes: the size of the index.
    """

    path: str
    file_of: Mapping[str, str]
    metadata: Any
    index_bytes: int

    def add_files(self, add: Callable[[str], None], found: Mapping[str, str]) -> None:
        """Adds the files in the order of their names.

        Args:
          add: adds all leaves of a file to what was found.
          found: the file in which each leaf was found.

        Raises:
          CorruptCheckpointError: a file is missing, or a leaf is not in the file that the index names.
        """
        for name in sorted(set(self.file_of.values())):
            try:
                add(name)
            except CheckpointNotFoundError:
                raise CorruptCheckpointError(
                    f"the file {name!r}, which the index names, is missing", path=self.path
                ) from None
        for leaf, file in self.file_of.items():
            if (there := found.get(leaf)) != file:
                where = "in no file that the index names" if there is None else f"in {there!r}"
                raise CorruptCheckpointError(
                    f"the index puts it into {file!r}, and it is {where}", path=self.path, leaf=leaf
                )


def read_weight_map(store: Store, name: str, *, suffix: str, limits: Limits) -> WeightMap:
    """Reads an index whose files end with `suffix`."""
    path = store.join(name)
    data = read_small(store, name, limit=limits.index_bytes)
    refuse_lfs_pointer(data, path)
    parsed = parse_object(data, path)
    file_of = parsed.get("weight_map")
    if not isinstance(file_of, dict):
        raise CorruptCheckpointError("'weight_map' is missing or not an object", path=path)
    for leaf, file in file_of.items():
        _check_file(leaf, file, suffix, path)
    return WeightMap(path, file_of, parsed.get("metadata"), len(data))


def found_twice(leaf: str, first: str, second: str, directory: str) -> CorruptCheckpointError:
    """Makes the error of a leaf that two files of one model hold."""
    return CorruptCheckpointError(
        f"is in {first!r} and in {second!r}; open one of them by its path", path=directory, leaf=leaf
    )


def _check_file(leaf: str, file: Any, suffix: str, path: str) -> None:
    """Proves that an index names a file in its own directory."""
    if not isinstance(file, str) or not file.endswith(suffix):
        raise CorruptCheckpointError(
            f"the index names {str(file)[:200]!r} for it, not a {suffix} file", path=path, leaf=leaf
        )
    if "://" in file:
        raise UnsafeCheckpointError(f"the index names the URL {file[:200]!r} for it", path=path, leaf=leaf)
    split_name(file, path=path, leaf=leaf)
