"""Proves that a directory tree holds only plain files, before a library that would follow links and wait on FIFOs reads
it.

TensorStore opens what stands under a name: through a symlink to anywhere, and a FIFO until somebody writes. So the
names below a checkpoint are looked at first. One listing per directory; nothing is opened.
"""

from __future__ import annotations

import os

from orbax_t5x.errors import CheckpointGoneError, CorruptCheckpointError
from orbax_t5x.storage.paths import Root, io_error


def list_directory(path: str, *, leaf: str | None = None) -> dict[str, os.DirEntry[str]]:
    """What stands in a directory, by name; a directory that is not there has vanished."""
    try:
        with os.scandir(path) as entries:
            return {entry.name: entry for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointGoneError("the directory vanished while it was listed", path=path, leaf=leaf) from None
    except OSError as error:
        raise io_error(error, "listing it", path=path, leaf=leaf) from error


def check_tree(root: Root, name: str, *, leaf: str | None = None, recurse: bool = True) -> list[str]:
    """Checks what lies under a directory inside the root.

    Args:
      root: what the tree must not leave.
      name: the directory, relative to the root; "" for the root itself.
      leaf: the leaf concerned, for errors.
      recurse: look into subdirectories too.

    Returns:
      The names in the directory itself, sorted.

    Raises:
      UnsafeCheckpointError: a symlink leads out of the root.
      CorruptCheckpointError: a FIFO, a socket, a device, a dangling symlink, or symlinks in a circle.
      CheckpointGoneError, CheckpointIOError: a directory vanished, or cannot be listed.
    """
    top: list[str] | None = None
    pending = [name]
    seen: set[str] = set()
    while pending:
        directory = pending.pop()
        found = list_directory(root.join(directory) if directory else root.path, leaf=leaf)
        top = sorted(found) if top is None else top
        for entry in found.values():
            path = f"{directory}/{entry.name}" if directory else entry.name
            inner: str | None = path
            if entry.is_symlink():
                inner = _follow(root, path, leaf, seen)
            elif entry.is_file(follow_symlinks=False):
                inner = None
            elif not entry.is_dir(follow_symlinks=False):
                raise CorruptCheckpointError("not a regular file", path=entry.path, leaf=leaf)
            if inner is not None and recurse:
                pending.append(inner)
    return top or []


def _follow(root: Root, name: str, leaf: str | None, seen: set[str]) -> str | None:
    """Where a symlink to a directory leads, relative to the root, once; None for a file."""
    target = root.locate(name, leaf=leaf)
    if os.path.isdir(target):
        if target in seen:
            return None
        seen.add(target)
        return os.path.relpath(target, root.path)
    root.stat(name, leaf=leaf)
    return None
