"""Where a conversion may write: a local directory, apart from the source, with nothing in the way."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from orbax_t5x.errors import CheckpointIOError, UnsupportedCheckpointError
from orbax_t5x.operations.replaceable import why_not_replaceable
from orbax_t5x.operations.writing import WriteOptions
from orbax_t5x.storage.paths import url_scheme


def local(destination: str | os.PathLike[str]) -> Path:
    """The destination as an absolute path, with `~` expanded as in a source's.

    Raises:
      TypeError: it is bytes.
      UnsupportedCheckpointError: it is a URL.
      CheckpointIOError: it is empty, or no path of any file.
    """
    text = os.fspath(destination)
    if not isinstance(text, str):
        raise TypeError(f"the destination {text!r} is not text")
    if not text:
        raise CheckpointIOError("the destination is empty; '.' is the working directory", errno=errno.EINVAL)
    if url_scheme(text) is not None:
        raise UnsupportedCheckpointError("only a local directory can be written", path=text)
    if "\0" in text:
        raise CheckpointIOError("the path holds a NUL, as no file's does", path=text, errno=errno.EINVAL)
    return Path(os.path.abspath(os.path.expanduser(text)))


def check_destination(target: Path, writing: WriteOptions) -> None:
    """Raises CheckpointIOError where something is in the way that was not to be replaced."""
    if not os.path.lexists(target):
        return
    if not writing.overwrite:
        raise _exists(target, "exists already; overwrite=True replaces it")
    if (reason := why_not_replaceable(target, writing.format)) is not None:
        raise _exists(target, f"{reason}, so it is not replaced; remove it yourself or choose another name")


def check_apart(target: Path, source: str) -> None:
    """Replacing a directory that the source lies in would delete the source; one inside of it would change it."""
    resolved, real_source = target.resolve(), Path(source).resolve()
    if os.path.lexists(target) and resolved in real_source.parents:
        raise _exists(target, f"holds the source {source!r}, so it is not replaced; choose another destination")
    if real_source in resolved.parents:
        raise CheckpointIOError(
            f"lies inside the source {source!r}; choose another destination", path=target, errno=errno.EINVAL
        )


def make_parents(parent: Path) -> list[Path]:
    """Makes the directory and its missing parents; returns those it made, outermost first."""
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    made: list[Path] = []
    try:
        for path in reversed(missing):
            path.mkdir()
            made.append(path)
    except OSError as error:
        raise CheckpointIOError(f"the directory could not be made: {error}", path=parent, errno=error.errno) from error
    return made


def _exists(target: Path, message: str) -> CheckpointIOError:
    return CheckpointIOError(message, path=target, errno=errno.EEXIST)
