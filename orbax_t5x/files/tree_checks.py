"""Proves that a directory tree holds only plain files.

Afterwards a library reads it that would follow links and wait on FIFOs. TensorStore opens any file of a name: through a
symlink to anywhere, and a FIFO until somebody writes. So the names below a checkpoint are checked first. One listing
per directory; nothing is opened.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence

from orbax_t5x.errors import CheckpointGoneError, CheckpointIOError, CorruptCheckpointError
from orbax_t5x.files.paths import Root, io_error, require_regular


def list_directory(path: str, *, leaf: str | None = None) -> dict[str, os.DirEntry[str]]:
    """Lists a directory by name; a missing directory has vanished."""
    try:
        with os.scandir(path) as entries:
            return {entry.name: entry for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointGoneError("the directory vanished while it was listed", path=path, leaf=leaf) from None
    except OSError as error:
        raise io_error(error, "listing it", path=path, leaf=leaf) from error


def check_tree(root: Root, name: str, *, leaf: str | None = None) -> None:
    """Checks everything under a directory inside the root."""
    for _ in _plain_files(root, name, leaf):
        pass


def _plain_files(root: Root, name: str, leaf: str | None) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Yields each directory under a name with its plain files.

    The listing is enough for files and directories: only symlinks are statted. The order depends only on names.
    """
    pending = [name]
    seen: set[str] = set()
    while pending:
        directory = pending.pop()
        prefix = f"{directory}/" if directory else ""
        entries = list_directory(root.join(directory), leaf=leaf)
        files: list[os.DirEntry[str]] = []
        for entry_name in sorted(entries):
            entry = entries[entry_name]
            if entry.is_file(follow_symlinks=False):
                files.append(entry)
            elif entry.is_dir(follow_symlinks=False):
                pending.append(prefix + entry_name)
            elif not entry.is_symlink():
                raise CorruptCheckpointError("not a regular file", path=entry.path, leaf=leaf)
            else:
                target, found = root.resolve(prefix + entry_name, leaf=leaf)
                if not stat.S_ISDIR(found.st_mode):
                    require_regular(found, target, leaf)
                    files.append(entry)
                elif target not in seen:
                    seen.add(target)
                    pending.append(os.path.relpath(target, root.path))
        yield directory, files


def tree_stamp(root: Root, names: Sequence[str], *, leaf: str | None = None) -> str:
    """Stats every file under some names, and returns a digest.

    A library that opens files by itself keeps none of them open for us, so each execution stats them once: the same
    names, and for each the same size, modification time and inode. What changes after that stat, while the library
    reads, is not noticed here. Kept is one digest, however many files there are.
    """
    digest = hashlib.blake2b(digest_size=16)
    for found in described_files(root, names, leaf):
        digest.update(repr(found).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def described_files(
    root: Root, names: Sequence[str], leaf: str | None
) -> Iterator[tuple[str, list[tuple[str, int, int, int]]]]:
    """Yields the directories of the names with their files' identities."""
    for name in names:
        path = root.join(name)
        try:
            path, found = root.resolve(name or ".", leaf=leaf)
            if not stat.S_ISDIR(found.st_mode):
                require_regular(found, path, leaf)
                yield name, [("", found.st_size, found.st_mtime_ns, found.st_ino)]
                continue
            for directory, files in _plain_files(root, name, leaf):
                # Every chunk of every array passes here: no object is made per file but this tuple.
                yield (
                    directory,
                    [(entry.name, (at := entry.stat()).st_size, at.st_mtime_ns, at.st_ino) for entry in files],
                )
        except CheckpointIOError:
            raise
        except FileNotFoundError as error:
            raise CheckpointGoneError("a file or its directory vanished", path=path, leaf=leaf) from error
        except OSError as error:
            raise io_error(error, "reading its status", path=path, leaf=leaf) from error
