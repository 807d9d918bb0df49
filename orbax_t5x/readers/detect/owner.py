"""Finds the format that owns a path by the formats' marks.

Two owners are an error, in any order.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from orbax_t5x.errors import Fix, UnsupportedCheckpointError
from orbax_t5x.files.places import files_at
from orbax_t5x.readers.detect.probe import PathProbe
from orbax_t5x.readers.format_table import Format, Mark

_SPECIAL = frozenset("*?[")
# The marks of a path in the order of their weight: own, hints of its own, hints beside it.
_STAGES = (("own", None), ("hint", False), ("hint", True))


def owner_of_file(probe: PathProbe, formats: Iterable[Format]) -> Format | None:
    """Returns the format of a file, or of a prefix of files."""
    rows = list(formats)
    for weight, is_beside in _STAGES:
        found: dict[str, str] = {}
        for row in rows:
            for mark in row.files:
                is_of_stage = mark.weight == weight and is_beside in (None, mark.beside is not None)
                if is_of_stage and _fits_path(mark, probe):
                    found[row.name] = "its first bytes" if mark.head is not None else f"its name ({mark.name})"
        if found:
            return _only(found, probe.path, rows)
    return None


def owner_of_directory(probe: PathProbe, formats: Iterable[Format]) -> Format | None:
    """Returns the format that owns a directory by its files."""
    rows = list(formats)
    if own := _marked(rows, "own", probe):
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
            if left := [name for name in loose[other] if not any(fnmatch.fnmatchcase(name, over) for over in passed)]:
                loose[other] = left
            else:
                del loose[other]
    return _only({name: found[0] for name, found in loose.items()}, probe.path, rows) if loose else None


def hinted_owner(probe: PathProbe, formats: Iterable[Format]) -> Format | None:
    """Returns the format of a directory by a hint."""
    rows = list(formats)
    found = _marked(rows, "hint", probe)
    return _only(found, probe.path, rows) if found else None


def two_owners(found: Mapping[str, str], path: str) -> UnsupportedCheckpointError:
    """Makes the error of a path with several formats' marks."""
    marks = ", and ".join(f"{name} by {mark}" for name, mark in found.items())
    return UnsupportedCheckpointError(
        f"{'two' if len(found) == 2 else len(found)} formats own this path: {marks}",
        path=path,
        fix=Fix.any_of(
            *(Fix.setting("say which to ot.open_checkpoint or ot.Source by {}", format=name) for name in found)
        ),
    )


def _only(found: Mapping[str, str], path: str, rows: Sequence[Format]) -> Format:
    if len(found) > 1:
        raise two_owners(found, path)
    return next(filter(lambda row: row.name in found, rows))


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


def _marked(rows: Sequence[Format], weight: str, probe: PathProbe) -> dict[str, str]:
    """Returns the marks of formats in a directory: a quoted name each."""
    found: dict[str, str] = {}
    for row in rows:
        for mark in row.directory:
            if mark.weight == weight and row.name not in found and (name := _fitting(mark, probe)) is not None:
                found[row.name] = repr(name)
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
