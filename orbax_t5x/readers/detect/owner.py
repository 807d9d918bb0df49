"""Finds the format that owns a path by the formats' marks.

Two owners are an error, in any order.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from orbax_t5x.errors import Fix, UnsupportedCheckpointError
from orbax_t5x.readers.detect.probe import PathProbe, is_file
from orbax_t5x.readers.format import Format, Mark

_SPECIAL = frozenset("*?[")


def owner_of_file(probe: PathProbe, formats: Iterable[Format]) -> Format | None:
    """Returns the format of a file, or of a prefix of files."""
    rows = list(formats)
    for stage in range(3):
        found = {
            row.name: _shown(mark)
            for row in rows
            for mark in row.files
            if _stage(mark) == stage and _fits_path(mark, probe)
        }
        if found:
            return _only(found, probe.path, rows)
    return None


def _stage(mark: Mark) -> int:
    """Orders the marks of a path: own, own hints, hints beside it."""
    return 0 if mark.weight == "own" else 1 if mark.beside is None else 2


def owner_of_directory(probe: PathProbe, formats: Iterable[Format]) -> Format | None:
    """Returns the format that owns a directory by its files."""
    rows = list(formats)
    own = {row.name: name for row in rows for name in _marked(row, "own", probe)[:1]}
    if own:
        return _only(own, probe.path, rows)
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
            if left := [name for name in loose[other] if not any(_is_named(name, over) for over in passed)]:
                loose[other] = left
            else:
                del loose[other]
    return _only({name: found[0] for name, found in loose.items()}, probe.path, rows) if loose else None


def hinted_owner(probe: PathProbe, formats: Iterable[Format]) -> Format | None:
    """Returns the format of a directory by a hint."""
    rows = list(formats)
    found = {row.name: name for row in rows for name in _marked(row, "hint", probe)[:1]}
    return _only(found, probe.path, rows) if found else None


def two_owners(found: Mapping[str, str], path: str) -> UnsupportedCheckpointError:
    """Makes the error of a path with several formats' marks."""
    marks = ", and ".join(f"{name} by {mark}" for name, mark in found.items())
    return UnsupportedCheckpointError(
        f"{'two' if len(found) == 2 else len(found)} formats own this path: {marks}",
        path=path,
        fix=Fix.any_of(*(Fix.setting("say which by {}", format=name) for name in found)),
    )


def _only(found: Mapping[str, str], path: str, rows: Sequence[Format]) -> Format:
    if len(found) > 1:
        raise two_owners(found, path)
    return next(row for row in rows if row.name in found)


def _shown(mark: Mark) -> str:
    """Describes the mark of a file for an error."""
    return "its first bytes" if mark.head is not None else f"its name ({mark.name})"


def _fits_path(mark: Mark, probe: PathProbe) -> bool:
    """Tests a mark on a path that the user named."""
    directory, name = os.path.split(probe.path)
    if not _is_named(name, mark.name) or (mark.but is not None and _is_named(name, mark.but)):
        return False
    if mark.beside is not None and not is_file(directory, _beside(mark.beside, name)):
        return False
    if probe.kind != "file":
        return probe.kind == "missing" and mark.beside is not None
    return _fits_bytes(mark, probe, None)


def _marked(row: Format, weight: str, probe: PathProbe) -> list[str]:
    """Returns the names in a directory with a format's mark, quoted."""
    marks = (mark for mark in row.directory if mark.weight == weight)
    return next(([repr(name)] for mark in marks for name in _fitting(mark, probe)), [])


def _fitting(mark: Mark, probe: PathProbe) -> Iterator[str]:
    """Yields the files of a directory that have a mark."""
    if any(name in probe.names for name in mark.without):
        return
    for name in _names_of(mark, probe):
        if mark.beside is not None and not _named(_beside(mark.beside, glob.escape(name)), probe.names):
            continue
        if mark.head is None and mark.tail is None:
            if is_file(probe.path, name):
                yield name
        elif (inside := probe.inside(name)).kind == "file" and _fits_bytes(mark, inside, probe):
            yield name


def _fits_bytes(mark: Mark, probe: PathProbe, directory: PathProbe | None) -> bool:
    """Tests a file's first and last bytes, and the path they name."""
    if mark.head is not None:
        match = _bytes_pattern(mark.head).match(probe.head)
        if match is None:
            return False
        if (named := match.groupdict().get("path")) is not None:
            return directory is not None and _is_there(directory, os.fsdecode(named) + mark.suffix_of_path)
    return mark.tail is None or _bytes_pattern(mark.tail).fullmatch(probe.tail) is not None


def _is_there(directory: PathProbe, path: str) -> bool:
    """Tests if a file's path names a file below its directory."""
    parts = path.split("/")[-1:] if path.startswith("/") else path.split("/")
    return ".." not in parts and directory.inside("/".join(parts)).kind == "file"


def _names_of(mark: Mark, probe: PathProbe) -> list[str]:
    """Lists the names in a directory that a mark is about, sorted."""
    names = _named(mark.name, probe.names)
    return sorted(name for name in names if mark.but is None or not _is_named(name, mark.but)) if names else names


def _beside(template: str, name: str) -> str:
    stem = os.path.splitext(name)[0]
    return template.replace("{name}", name).replace("{stem}", stem)


def _named(pattern: str, names: frozenset[str]) -> list[str]:
    """Lists the names that match a glob."""
    kind, text = _plain_pattern(pattern)
    if kind == "name":
        return [text] if text in names else []
    if kind == "suffix":
        return [name for name in names if name.endswith(text)]
    return list(filter(_name_pattern(pattern).match, names))


@functools.lru_cache(maxsize=256)
def _plain_pattern(pattern: str) -> tuple[str, str]:
    """Recognises globs of a single name or suffix."""
    if not _SPECIAL & set(pattern):
        return "name", pattern
    is_suffix = pattern.startswith("*") and not _SPECIAL & set(pattern[1:])
    return ("suffix", pattern[1:]) if is_suffix else ("glob", pattern)


def _is_named(name: str, pattern: str) -> bool:
    kind, text = _plain_pattern(pattern)
    if kind == "glob":
        return _name_pattern(pattern).match(name) is not None
    return name.endswith(text) if kind == "suffix" else name == text


@functools.lru_cache(maxsize=256)
def _name_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern))


@functools.lru_cache(maxsize=256)
def _bytes_pattern(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.DOTALL)
