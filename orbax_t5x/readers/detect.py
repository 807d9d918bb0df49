"""Detects the format of a path, by the formats' marks.

Two owners are an error, in any order. Names and a few bytes are read once, without blocking. A `PathProbe` is plain
data; the recognisers of the formats are functions of it, and reach the file system only through this module. The path
itself is trusted. Names below it are probed through the root's resolver: a link that leads out is never followed, a
FIFO or a device never opened.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import glob
import os
import re
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable

from orbax_t5x.errors import CheckpointNotFoundError, Fix, UnsupportedCheckpointError, for_caller
from orbax_t5x.files.interface import Files, Subdirectories
from orbax_t5x.files.places import files_at, resolved_path
from orbax_t5x.readers.format_table import BUNDLE_STATE, MSGPACK_MAP, SSTABLE_TAIL, Format, Mark
from orbax_t5x.text.masked import masked

# Enough for every magic number, and for the first keys of a msgpack map.
_HEAD_BYTES = 256
# The last bytes of an SSTable are its magic number, those of an old T5X file its version.
_TAIL_BYTES = 16


@dataclasses.dataclass(frozen=True, eq=False)
class PathProbe:
    """Result of a probe of a path.

    Attributes:
      path: absolute, symlinks as the caller gave them.
      kind, head, size, names: as of a `Look`.
    """

    path: str
    kind: str
    head: bytes = b""
    local_tail: bytes | None = None
    size: int | None = 0
    names: frozenset[str] = frozenset()
    _probed: dict[str, PathProbe] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def files(self) -> Files:
        """The files of the path."""
        return files_at(self.path)

    @functools.cached_property
    def tail(self) -> bytes:
        """The last bytes of a file."""
        if self.local_tail is not None or self.kind != "file":
            return self.local_tail or b""
        return self.files.look(head=0, tail=_TAIL_BYTES).tail

    def inside(self, name: str) -> PathProbe:
        """Probes a name in this directory once."""
        if name not in self._probed:
            self._probed[name] = _probe(self.files, self.files.join(name), name)
        return self._probed[name]


def is_file(directory: str, name: str) -> bool:
    """Tests if a name is a regular file, as `Files.has_file` does."""
    return files_at(directory).has_file(name)


def subdirectories(directory: str) -> Subdirectories:
    """Lists a directory."""
    return files_at(directory).subdirectories()


def probe_path(path: str) -> PathProbe:
    """Probes a path."""
    files = files_at(path)
    return _probe(files, files.named, "")


def _probe(files: Files, path: str, name: str) -> PathProbe:
    look = files.look(name, head=_HEAD_BYTES, tail=0 if files.is_remote else _TAIL_BYTES)
    return PathProbe(path, look.kind, look.head, None if files.is_remote else look.tail, look.size, look.names)


def is_sstable(probe: PathProbe) -> bool:
    """Tests if a file ends as an SSTable does."""
    return probe.kind == "file" and re.fullmatch(SSTABLE_TAIL, probe.tail, re.DOTALL) is not None


def is_bundle_state(probe: PathProbe) -> bool:
    """Tests if a file is TensorFlow's record of the newest bundle."""
    return probe.kind == "file" and re.match(BUNDLE_STATE, probe.head, re.DOTALL) is not None


def is_msgpack_map(probe: PathProbe) -> bool:
    """Tests if a file begins with a msgpack map of text keys."""
    return probe.kind == "file" and re.match(MSGPACK_MAP, probe.head, re.DOTALL) is not None


_SPECIAL = frozenset("*?[")
# Formats with their mark of a path, by name.
_Marks = dict[str, tuple[Format, str]]
# The marks of a path in the order of their weight: own, hints of its own, hints beside it.
_STAGES = (("own", None), ("hint", False), ("hint", True))


def owner_of_file(probe: PathProbe, rows: Sequence[Format]) -> Format | None:
    """Returns the format of a file, or of a prefix of files."""
    for weight, is_beside in _STAGES:
        found: _Marks = {}
        for row in rows:
            for mark in row.files:
                is_of_stage = mark.weight == weight and is_beside in (None, mark.beside is not None)
                if is_of_stage and _fits_path(mark, probe):
                    found[row.name] = row, "its first bytes" if mark.head is not None else f"its name ({mark.name})"
        if owner := _only(found, probe.path):
            return owner
    return None


def owner_of_directory(probe: PathProbe, rows: Sequence[Format]) -> Format | None:
    """Returns the format that owns a directory by its files."""
    if own := _only(_marked(rows, "own", probe), probe.path):
        return own
    loose: dict[str, list[str]] = {}
    for row in rows:
        if names := [name for mark in row.directory if mark.weight == "loose" for name in _names_of(mark, probe)]:
            loose[row.name] = names
    for row in rows:
        passed = [
            over
            for mark in row.directory
            if mark.over and row.name in loose and _names_of(mark, probe)
            for over in mark.over
        ]
        for other in [name for name in loose if name != row.name and passed]:
            if left := [name for name in loose[other] if not any(fnmatch.fnmatchcase(name, over) for over in passed)]:
                loose[other] = left
            else:
                del loose[other]
    return _only({row.name: (row, loose[row.name][0]) for row in rows if row.name in loose}, probe.path)


def hinted_owner(probe: PathProbe, rows: Sequence[Format]) -> Format | None:
    """Returns the format of a directory by a hint."""
    return _only(_marked(rows, "hint", probe), probe.path)


def two_owners(found: Mapping[str, str], path: str) -> UnsupportedCheckpointError:
    """Makes the error of a path with several formats' marks."""
    marks = ", and ".join(f"{name} by {mark}" for name, mark in found.items())
    count = "two" if len(found) == 2 else len(found)
    return UnsupportedCheckpointError(
        f"{count} formats own this path: {marks}; ot.open_checkpoint, ot.verify and ot.Source take format=",
        path=path,
        fix=Fix.any_of(*(Fix.setting("say which by {}", format=name) for name in found)),
    )


def _only(found: _Marks, path: str) -> Format | None:
    if len(found) > 1:
        raise two_owners({name: mark for name, (_, mark) in found.items()}, path)
    for row, _ in found.values():
        return row
    return None


def _fits_path(mark: Mark, probe: PathProbe) -> bool:
    """Tests a mark on a path that the user named."""
    directory, name = os.path.split(probe.path)
    if not fnmatch.fnmatchcase(name, mark.name) or (mark.but is not None and fnmatch.fnmatchcase(name, mark.but)):
        return False
    if mark.beside is not None and not files_at(directory).has_file(_beside(mark.beside, name)):
        return False
    if probe.kind != "file":
        return probe.kind == "missing" and mark.beside is not None
    return _fits_bytes(mark, probe, None)


def _marked(rows: Sequence[Format], weight: str, probe: PathProbe) -> _Marks:
    """Returns the marks of formats in a directory: a quoted name each."""
    found: _Marks = {}
    for row in rows:
        for mark in row.directory:
            if mark.weight == weight and row.name not in found and (name := _fitting(mark, probe)) is not None:
                found[row.name] = row, repr(name)
    return found


def _fitting(mark: Mark, probe: PathProbe) -> str | None:
    """Finds a file of a directory that has a mark."""
    if not probe.names.isdisjoint(mark.without):
        return None
    for name in _names_of(mark, probe):
        if mark.beside is not None and not _named(_beside(mark.beside, glob.escape(name)), probe.names):
            continue
        if mark.head is None and mark.tail is None:
            if probe.files.has_file(name):
                return name
        elif (inside := probe.inside(name)).kind == "file" and _fits_bytes(mark, inside, probe):
            return name
    return None


def _fits_bytes(mark: Mark, probe: PathProbe, directory: PathProbe | None) -> bool:
    """Tests a file's first and last bytes, and the path they name."""
    if mark.head is not None:
        match = re.match(mark.head, probe.head, re.DOTALL)
        if match is None:
            return False
        if (named := match.groupdict().get("path")) is not None:
            return directory is not None and _is_there(directory, os.fsdecode(named) + mark.suffix_of_path)
    return mark.tail is None or re.fullmatch(mark.tail, probe.tail, re.DOTALL) is not None


def _is_there(directory: PathProbe, path: str) -> bool:
    """Tests if a file's path names a file below its directory."""
    parts = path.split("/")[-1:] if path.startswith("/") else path.split("/")
    return ".." not in parts and directory.inside("/".join(parts)).kind == "file"


def _names_of(mark: Mark, probe: PathProbe) -> list[str]:
    """Lists the names in a directory that a mark is about, sorted."""
    names = _named(mark.name, probe.names)
    but = set(fnmatch.filter(names, mark.but)) if mark.but is not None else ()
    return sorted(set(names).difference(but)) if names else names


def _beside(template: str, name: str) -> str:
    return template.replace("{name}", name).replace("{stem}", os.path.splitext(name)[0])


def _named(pattern: str, names: frozenset[str]) -> list[str]:
    """Lists the names that match a glob."""
    if not _SPECIAL.isdisjoint(pattern):
        return fnmatch.filter(names, pattern)
    return [pattern] if pattern in names else []


UserPath = str | os.PathLike[str] | Traversable
"""Path or URL as users give it; files of a package are paths, too."""


def path_text(path: UserPath) -> str:
    """Returns the path as text; finds paths on the hub."""
    if isinstance(path, (list, tuple)):
        message = (
            f"one path is opened at a time, and this is a {type(path).__name__} of {len(path)}; several sources are a "
            "dict of names and paths, given to `restore`"
        )
        raise for_caller(TypeError(message))
    if not isinstance(path, (str, os.PathLike)):
        kind = path.__name__ if isinstance(path, type) else type(path).__name__
        raise for_caller(TypeError(f"a checkpoint's path is text or an os.PathLike, not {kind}{_order_hint(path)}"))
    text = os.fspath(path)
    if not isinstance(text, str):
        raise for_caller(TypeError(masked(f"the path {path!r} is not text")))
    if not text:
        raise CheckpointNotFoundError("the path is empty; '.' is the working directory")
    if "\0" in text:
        raise CheckpointNotFoundError("the path holds a NUL, as no file's does", path=text)
    return resolved_path(text)


def _order_hint(given: object) -> str:
    """Returns a hint on the order of a restore's arguments."""
    is_target = isinstance(given, dict) or callable(given) or hasattr(type(given), "shape")
    return "; the checkpoint is the first argument, and the target the second" if is_target else ""


def check_item(item: object) -> None:
    """Checks that `item=` is a name."""
    if item is not None and not isinstance(item, str):
        message = (
            f"item= is the name of an item in an Orbax step, not a {type(item).__name__}; the tree to restore into is "
            "the second argument, target"
        )
        raise for_caller(TypeError(message))
