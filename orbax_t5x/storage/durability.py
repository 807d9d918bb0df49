"""Makes local files and directories durable: what they hold survives a loss of power from then on."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Syncs the entries of a local directory, and the files directly in it."""
    for entry in os.scandir(directory):
        if entry.is_file(follow_symlinks=False):
            sync_path(entry.path)
    sync_path(directory)


def sync_path(path: str | os.PathLike[str]) -> None:
    """Syncs one file, or the entries of one directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
