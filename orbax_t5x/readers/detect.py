"""Detects the format of a path by the formats' marks.

Two owners are an error, in any order. The path itself is trusted. Names under it are looked at through the path's
`Files`: a link that leads out is never followed, and a FIFO or a device is never opened.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable

from orbax_t5x.errors import CheckpointNotFoundError, Fix, UnsupportedCheckpointError, for_caller
from orbax_t5x.files.interface import Files, Look, Subdirectories
from orbax_t5x.files.places import files_at, resolved_path
from orbax_t5x.readers.format_table import Format, Mark, Weight

# Enough for every magic number, and for the first keys of a msgpack map.
_HEAD_BYTES = 256
# The last bytes of an SSTable are its magic number, those of an old T5X file its version.
_TAIL_BYTES = 16
_GLOB_CHARACTERS = frozenset("*?[")


class PathProbe:
    """Kind, names, and first and last bytes of a path, each read once.

    Attributes:
      files: Files of the path.
      path: Absolute path, with symlinks as the caller gave them.
    """

    def __init__(self, files: Files):
        self.files = files
        self.path: str = files.named
        self._looks: dict[str, Look] = {}

    @property
    def kind(self) -> str:
        """The kind of the path, as of a `Look`."""
        return self.look().kind

    @property
    def names(self) -> frozenset[str]:
        """The names in a directory."""
        return self.look().names

    @functools.cached_property
    def subdirectories(self) -> Subdirectories:
        """The directories in a directory."""
        return self.files.subdirectories()

    def look(self, name: str = "") -> Look:
        """Looks at the path or at a name under it, once."""
        if name not in self._looks:
            tail = 0 if self.files.is_remote else _TAIL_BYTES
            self._looks[name] = self.files.look(name, head=_HEAD_BYTES, tail=tail)
        return self._looks[name]

    def has_bytes(self, mark: Mark, name: str = "") -> bool:
        """Returns True if a regular file has the first and last bytes of a mark."""
        look = self.look(name)
        if look.kind != "file" or re.match(mark.head or b"", look.head, re.DOTALL) is None:
            return False
        if mark.tail is None:
            return True
        tail = self.files.look(name, head=0, tail=_TAIL_BYTES).tail if self.files.is_remote else look.tail
        return re.fullmatch(mark.tail, tail, re.DOTALL) is not None


def owner_of_file(probe: PathProbe, rows: Sequence[Format]) -> Format | None:
    """Returns the format of a file, or of a prefix of files."""
    # A hint of the file itself goes before a hint by a file beside it, for which a store is asked once more.
    for weight, is_beside in (("own", None), ("hint", False), ("hint", True)):
        owners: dict[Format, str] = {}
        for row in rows:
            for mark in row.files:
                is_of_stage = mark.weight == weight and is_beside in (None, mark.beside is not None)
                if is_of_stage and _marks_path(mark, probe):
                    owners[row] = f"its name ({mark.name})" if mark.head is None else "its first bytes"
        if owners:
            return _only_owner(owners, probe.path)
    return None


def owner_of_directory(probe: PathProbe, rows: Sequence[Format]) -> Format | None:
    """Returns the format that owns a directory by its files."""
    if (owner := owner_by_marks(probe, rows, "own")) is not None:
        return owner
    kept: set[str] = set()
    passed_over: set[str] = set()
    for row in rows:
        for mark in row.directory:
            if mark.over and (names := _names_of(mark, probe)):
                kept.update(names)
                for pattern in mark.over:
                    passed_over.update(fnmatch.filter(probe.names, pattern))
    return owner_by_marks(probe, rows, "loose", passed_over - kept)


def owner_by_marks(
    probe: PathProbe, rows: Iterable[Format], weight: Weight, passed_over: Collection[str] = ()
) -> Format | None:
    """Returns the format that has a mark of this weight in a directory.

    `passed_over`: files that hold the same model in other encodings.
    """
    owners: dict[Format, str] = {}
    for row in rows:
        for name in _marked_names(row, probe, weight):
            if name not in passed_over:
                owners[row] = repr(name)
                break
    return _only_owner(owners, probe.path)


def two_owners(marks: Mapping[str, str], path: str) -> UnsupportedCheckpointError:
    """Makes the error of a path with the marks of several formats."""
    words = ", and ".join(f"{name} by {mark}" for name, mark in marks.items())
    count = "two" if len(marks) == 2 else len(marks)
    return UnsupportedCheckpointError(
        f"{count} formats own this path: {words}; ot.open_checkpoint, ot.verify and ot.Source take format=",
        path=path,
        fix=Fix.any_of(*(Fix.setting("say which by {}", format=name) for name in marks)),
    )


def _only_owner(owners: Mapping[Format, str], path: str) -> Format | None:
    if len(owners) > 1:
        raise two_owners({row.name: words for row, words in owners.items()}, path)
    return next(iter(owners), None)


def _marks_path(mark: Mark, probe: PathProbe) -> bool:
    """Returns True if a mark fits the path that the user named."""
    directory, name = os.path.split(probe.path)
    if not has_name(mark, name):
        return False
    if mark.beside is None:
        return probe.has_bytes(mark)
    # A prefix of files is no file itself.
    if not files_at(directory).has_file(_beside(mark.beside, name)):
        return False
    return probe.kind == "missing" or probe.has_bytes(mark)


def _marked_names(row: Format, probe: PathProbe, weight: Weight) -> Iterator[str]:
    """Yields the files of a directory that have a format's marks of a weight."""
    for mark in row.directory:
        if mark.weight != weight or not probe.names.isdisjoint(mark.without):
            continue
        for name in _names_of(mark, probe):
            is_of_bytes = mark.head is not None or mark.tail is not None
            if probe.has_bytes(mark, name) if is_of_bytes else probe.files.has_file(name):
                yield name


def _names_of(mark: Mark, probe: PathProbe) -> list[str]:
    """Lists the names in a directory that a mark is about, sorted."""
    names = [name for name in sorted(_filtered(mark.name, probe.names)) if has_name(mark, name)]
    if mark.beside is None:
        return names
    return [name for name in names if _filtered(_beside(mark.beside, glob.escape(name)), probe.names)]


def has_name(mark: Mark, name: str) -> bool:
    """Returns True if a mark is about files of this name."""
    if mark.but is not None and fnmatch.fnmatchcase(name, mark.but):
        return False
    return fnmatch.fnmatchcase(name, mark.name)


def _filtered(pattern: str, names: frozenset[str]) -> list[str]:
    """Lists the names that match a glob."""
    if _GLOB_CHARACTERS.isdisjoint(pattern):
        return [pattern] if pattern in names else []
    return fnmatch.filter(names, pattern)


def _beside(template: str, name: str) -> str:
    return template.replace("{name}", name).replace("{stem}", os.path.splitext(name)[0])


UserPath = str | os.PathLike[str] | Traversable
"""Path or URL as users give it; files of a package are paths, too."""


def path_text(path: UserPath) -> str:
    """Returns the path as text; finds paths on the hub."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        message = (
            f"a checkpoint's path is text or an os.PathLike, not {getattr(path, '__name__', type(path).__name__)}; the "
            "checkpoint is the first argument, and the target the second; several sources are a dict of names and paths"
        )
        raise for_caller(TypeError(message))
    if not text:
        raise CheckpointNotFoundError("the path is empty; '.' is the working directory")
    if "\0" in text:
        raise CheckpointNotFoundError("the path holds a NUL, as no file's does", path=text)
    return resolved_path(text)


def check_item(item: object) -> None:
    """Checks that `item=` is a name."""
    if item is not None and not isinstance(item, str):
        message = (
            f"item= is the name of an item in an Orbax step, not a {type(item).__name__}; the tree to restore into is "
            "the second argument, target"
        )
        raise for_caller(TypeError(message))
