"""Checks a destination: a local directory, apart from the source, that does not exist or may be replaced."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from orbax_t5x.errors import CheckpointIOError, Fix, UnsupportedCheckpointError
from orbax_t5x.operations.convert.output_format import WriteOptions
from orbax_t5x.operations.convert.replaceable import reason_not_replaceable
from orbax_t5x.readers import Checkpoint
from orbax_t5x.readers.detect.probe import is_file
from orbax_t5x.readers.orbax.steps import STEP_METADATA_FILE, step_of_name
from orbax_t5x.storage.paths import url_scheme

# Formats whose checkpoints are steps below a root, of which the newest is opened.
_WITH_STEPS = ("orbax", "t5x")


def local_destination(destination: str | os.PathLike[str]) -> Path:
    """Returns the destination as an absolute path, with `~` expanded as in a source's."""
    text = os.fspath(destination)
    if not isinstance(text, str):
        raise TypeError(f"the destination {text!r} is not text")
    if not text:
        raise CheckpointIOError("the destination is empty; '.' is the working directory", errno=errno.EINVAL)
    if url_scheme(text) is not None:
        raise UnsupportedCheckpointError("only a local directory can be written", path=text)
    if "\0" in text:
        raise CheckpointIOError("the path contains a NUL byte", path=text, errno=errno.EINVAL)
    return Path(os.path.abspath(os.path.expanduser(text)))


def check_destination(target: Path, writing: WriteOptions) -> None:
    """Raises CheckpointIOError where something is in the way that was not to be replaced."""
    if not os.path.lexists(target):
        return
    if not writing.overwrite:
        raise _exists(target, "exists already", Fix.setting("pass {} to replace it", overwrite=True))
    if (reason := reason_not_replaceable(target, writing.format)) is not None:
        raise _exists(target, f"{reason}, so it is not replaced; remove it yourself or choose another name")


def check_apart(target: Path, source: Checkpoint) -> None:
    """Refuses a destination that would delete the source, or change it.

    Everything in the source's directory, or in the step or root that it was opened by, belongs to the source. With a
    step as the source, another step may be written beside it.
    """
    resolved, real_source = target.resolve(), Path(source.path).resolve()
    if os.path.lexists(target) and resolved in real_source.parents:
        raise _exists(target, f"holds the source {source.path!r}, so it is not replaced; choose another destination")
    step = _step_directory(source, real_source)
    # A directory given for a TensorFlow bundle in it is opened as the bundle, whatever else is below.
    given = Path(source.given_path).resolve() if source.format in _WITH_STEPS else real_source
    for owner in (real_source, given) if step is None else (real_source, given, step):
        if owner in resolved.parents and resolved not in (real_source, step):
            raise _inside(target, f"is inside the source {str(owner)!r}; choose a destination outside of it")


def _step_directory(source: Checkpoint, path: Path) -> Path | None:
    """Returns the directory of the step that the source is, or is an item of, or None if it is neither."""
    if source.format not in _WITH_STEPS or source.step is None:
        return None
    if is_file(str(path.parent), STEP_METADATA_FILE):
        return path.parent
    directories = (one for one in (path, path.parent) if one.is_dir())
    return next((one for one in directories if step_of_name(one.name) == source.step), None)


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


def _inside(target: Path, message: str) -> CheckpointIOError:
    return CheckpointIOError(message, path=target, errno=errno.EINVAL)


def _exists(target: Path, message: str, fix: Fix | None = None) -> CheckpointIOError:
    return CheckpointIOError(message, path=target, fix=fix, errno=errno.EEXIST)
