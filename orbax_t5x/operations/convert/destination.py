"""Destinations of conversions: the interface, and local directories.

A checkpoint is made whole in a work directory on a local disk first, whatever the destination; publishing it is a
rename where that is local (`LocalDestination`), and an upload to a bucket or to the Hugging Face hub.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Protocol

from orbax_t5x.errors import CheckpointError, CheckpointIOError, Fix
from orbax_t5x.files.interface import Files
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.operations.convert.output_format import WriteOptions
from orbax_t5x.operations.convert.safetensors_output import CONFIG_NAME, WEIGHTS
from orbax_t5x.operations.convert.work_directory import WorkDirectory
from orbax_t5x.readers import Checkpoint
from orbax_t5x.readers.orbax.metadata import METADATA_FILE, read_item_metadata
from orbax_t5x.readers.orbax.open import read_step_metadata
from orbax_t5x.readers.orbax.steps import STEP_METADATA_FILE, item_names, step_of_name

# Formats whose checkpoints are steps below a root, of which the newest is opened.
_WITH_STEPS = ("orbax", "t5x")


class Destination(Protocol):
    """Destination of a conversion.

    Attributes:
      name: the path or URL.
      target: the local directory that is made, or in whose place one is: the work directory is beside it.
    """

    name: str
    target: Path

    def options(self, writing: WriteOptions) -> WriteOptions:
        """Returns the options as this destination needs them."""
        return writing

    def check(self, writing: WriteOptions) -> None:
        """Raises CheckpointIOError if the destination is taken."""
        ...

    def check_apart(self, source: Checkpoint) -> None:
        """Refuses a destination that would delete the source, or change it."""
        ...

    def publish(self, work: WorkDirectory, written: Path, writing: WriteOptions) -> None:
        """Makes a whole directory the destination's."""
        ...


class LocalDestination(Destination):
    """A local directory."""

    def __init__(self, path: str):
        if not path:
            raise CheckpointIOError("the destination is empty; '.' is the working directory", errno=errno.EINVAL)
        if "\0" in path:
            raise CheckpointIOError("the path contains a NUL byte", path=path, errno=errno.EINVAL)
        self.target: Path = Path(os.path.abspath(os.path.expanduser(path)))
        self.name: str = str(self.target)

    def check(self, writing: WriteOptions) -> None:
        if not os.path.lexists(self.target):
            return
        names = set(os.listdir(self.target)) if self.target.is_dir() else None
        check_replaceable(self.name, reason_not_replaceable(lambda: LocalFiles(self.target), names, writing))
        require_overwrite(self.name, writing)

    def check_apart(self, source: Checkpoint) -> None:
        _check_apart(self.target, source)

    def publish(self, work: WorkDirectory, written: Path, writing: WriteOptions) -> None:
        work.put_in_place(written)


def staging_directory(url: str) -> Path:
    """Returns the local path for making a URL's checkpoint.

    It is below `TMPDIR`, or in `/var/tmp`. That is kept when the machine is started again, other than `/tmp`.
    """
    parent = os.environ.get("TMPDIR") or "/var/tmp"
    return Path(parent) / f"orbax-t5x-{hashlib.sha256(url.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}"


def require_overwrite(name: str, writing: WriteOptions) -> None:
    """Raises CheckpointIOError unless a destination that exists may be replaced."""
    if not writing.overwrite:
        raise _exists(name, "exists already", Fix.setting("pass {} to replace it", overwrite=True))


def check_replaceable(name: str, reason: str | None) -> None:
    """Raises CheckpointIOError if there is a reason not to replace a destination."""
    if reason is not None:
        raise _exists(name, f"{reason}, so it is not replaced; remove it yourself or choose another name")


def check_apart_by_name(name: str, source: Checkpoint) -> None:
    """Refuses a remote destination inside or around the source."""
    if source.path.startswith(f"{name}/"):
        raise _exists(name, f"holds the source {source.path!r}, so it is not replaced; choose another destination")
    for owner in (source.path, source.given_path if source.format in _WITH_STEPS else source.path):
        if name.startswith(f"{owner}/"):
            raise _inside(name, f"is inside the source {owner!r}; choose a destination outside of it")


def _check_apart(target: Path, source: Checkpoint) -> None:
    """Refuses a destination that would delete the source, or change it.

    Everything in the source's directory, or in the step or root that it was opened by, belongs to the source. With a
    step as the source, another step may be written beside it.
    """
    resolved, real_source = target.resolve(), Path(source.path).resolve()
    if os.path.lexists(target) and resolved in real_source.parents:
        raise _exists(
            str(target), f"holds the source {source.path!r}, so it is not replaced; choose another destination"
        )
    step = _step_directory(source, real_source)
    # A directory given for a TensorFlow bundle in it is opened as the bundle, whatever else is below.
    given = Path(source.given_path).resolve() if source.format in _WITH_STEPS else real_source
    for owner in (real_source, given) if step is None else (real_source, given, step):
        if owner in resolved.parents and resolved not in (real_source, step):
            raise _inside(str(target), f"is inside the source {str(owner)!r}; choose a destination outside of it")


def _step_directory(source: Checkpoint, path: Path) -> Path | None:
    """Returns the directory of the source's step, or None."""
    if source.format not in _WITH_STEPS or source.step is None:
        return None
    if (path.parent / STEP_METADATA_FILE).is_file():
        return path.parent
    directories = (one for one in (path, path.parent) if one.is_dir())
    return next((one for one in directories if step_of_name(one.name) == source.step), None)


@contextlib.contextmanager
def made_parents(parent: Path) -> Generator[None, None, None]:
    """Makes a directory and its missing parents."""
    with contextlib.ExitStack() as made:
        for path in reversed([path for path in (parent, *parent.parents) if not path.exists()]):
            try:
                path.mkdir()
            except OSError as error:
                message = f"the directory could not be made: {error}"
                raise CheckpointIOError(message, path=parent, errno=error.errno) from error
            made.callback(_remove_if_empty, path)
        yield


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _inside(target: str, message: str) -> CheckpointIOError:
    return CheckpointIOError(message, path=target, errno=errno.EINVAL)


def _exists(target: str, message: str, fix: Fix | None = None) -> CheckpointIOError:
    return CheckpointIOError(message, path=target, fix=fix, errno=errno.EEXIST)


# Names that Orbax writes into an item or a step beside arrays.
_ORBAX_NAMES = re.compile(
    r"_METADATA|_CHECKPOINT_METADATA|_sharding|_strings\.json|_CHECKSUMS\.json|manifest\.ocdbt|d|ocdbt\.process_\d+"
    r"|array_metadatas|checkpoint|commit_success\.txt|descriptor"
)


# Of these an upload that was stopped leaves some, without the metadata that make them a checkpoint.
_UNFINISHED = re.compile(
    r"_CHECKPOINT_METADATA|_sharding|_strings\.json|_CHECKSUMS\.json|manifest\.ocdbt|d|ocdbt\.process_\d+"
    r"|array_metadatas|commit_success\.txt"
)


def is_unfinished(names: set[str]) -> bool:
    """Returns True if all files of a directory are what an unfinished upload of an Orbax item leaves."""
    return all(map(_UNFINISHED.fullmatch, names))


def reason_not_replaceable(store: Callable[[], Files], names: set[str] | None, writing: WriteOptions) -> str | None:
    """Returns why a directory must not be replaced, or None."""
    if names is None:
        return "is not a directory"
    if not names:
        return None
    if writing.format != "orbax":
        # A user may have added a tokenizer.
        written = {CONFIG_NAME, *(writing.beside or ())}
        others = sorted(name for name in names - written if not WEIGHTS.fullmatch(name))
        return f"holds {others[0]!r} beside safetensors files" if others else None
    try:
        known = _names_of_orbax(store(), names)
    except CheckpointError as error:
        return f"is not an Orbax checkpoint ({error.message})"
    if known is None:
        return "is not an Orbax checkpoint"
    others = sorted(name for name in names if not _ORBAX_NAMES.fullmatch(name) and name not in known)
    return f"is an Orbax checkpoint that holds {others[0]!r}, which Orbax did not write" if others else None


def _names_of_orbax(root: Files, names: set[str]) -> set[str] | None:
    """Lists a checkpoint's names of arrays and items, or None."""
    known: set[str] = set()
    if METADATA_FILE in names:
        nodes = read_item_metadata(root, "").nodes
        known |= {node.param.split("/")[0] for node in nodes}
    elif STEP_METADATA_FILE in names:
        handlers = read_step_metadata(root).get("item_handlers")
        known |= set(handlers) if isinstance(handlers, dict) else set()
        known |= set(item_names(root))
        if not known:
            return None
    else:
        return None
    return known
