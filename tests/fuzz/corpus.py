"""The saved inputs of each target: findings as files that say their error, and what fuzzing grew as one archive."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.targets import TARGETS

_CORPUS = Path(__file__).parent.parent / "corpus"


def findings(name: str) -> dict[str, bytes]:
    """Inputs that once broke a reader, by file name."""
    directory = _CORPUS / name
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*"))} if directory.is_dir() else {}


def grown_path(name: str) -> Path:
    """The archive of what fuzzing grew."""
    return _CORPUS / "grown" / f"{name}.zip"


def grown(name: str) -> dict[str, bytes]:
    """Inputs that together reach what fuzzing has reached, by their digest."""
    path = grown_path(name)
    if not path.exists():
        return {}
    with zipfile.ZipFile(path) as archive:
        return {entry: archive.read(entry) for entry in sorted(archive.namelist())}


def inputs(name: str) -> Iterator[bytes]:
    """All that a run begins with."""
    yield from TARGETS[name].seeds()
    yield from findings(name).values()
    yield from grown(name).values()
