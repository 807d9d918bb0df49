"""Makes local files and directories survive a loss of power."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Syncs a local directory's entries, and the files directly in it."""
    for entry in os.scandir(directory):
        if entry.is_file(follow_symlinks=False):
            sync_path(entry.path)
    sync_path(directory)


def sync_path(path: str | os.PathLike[str]) -> None:
    """Syncs a file, or the entries of a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
