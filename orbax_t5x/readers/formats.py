"""The ordered table of formats, and `open_checkpoint`, which looks a path up in it.

Each row has recognisers, functions of what was found at the path (names and a few bytes), and an opener. A directory
belongs to the format that owns it, whatever else is in it: first the formats that mark a checkpoint, then a root by its
finished steps, then the formats that mark a directory of files, then files that any directory may hold. Where no format
owns the path, the error names what was sought and found.
"""

from __future__ import annotations

import errno
import itertools
import os

from orbax_t5x.concurrency import guarded
from orbax_t5x.errors import CheckpointIOError, CheckpointNotFoundError, Fix, UnsupportedCheckpointError, for_caller
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.detect.format import Format
from orbax_t5x.readers.detect.gguf_format import FORMAT as GGUF
from orbax_t5x.readers.detect.npz_format import FORMAT as NPZ
from orbax_t5x.readers.detect.probe import PathProbe, probe_path
from orbax_t5x.readers.detect.torch_zip_format import FORMAT as TORCH
from orbax_t5x.readers.detect.user_path import check_item, path_text
from orbax_t5x.readers.flax_msgpack.format import FORMAT as FLAX_MSGPACK
from orbax_t5x.readers.flax_msgpack.root import newest_file
from orbax_t5x.readers.orbax.format import FORMAT as ORBAX
from orbax_t5x.readers.orbax.steps import Step, finished_steps, newest_directory
from orbax_t5x.readers.safetensors.format import FORMAT as SAFETENSORS
from orbax_t5x.readers.t5x.format import FORMAT as T5X
from orbax_t5x.readers.tf_bundle.format import FORMAT as TF_BUNDLE
from orbax_t5x.readers.unrecognised import missing_error, unrecognised_error
from orbax_t5x.storage.limits import Limits, check_limits
from orbax_t5x.storage.locations import files_at
from orbax_t5x.storage.opening import opening

# Formats whose marks make a directory one checkpoint; in a root, files of the others lie beside the steps.
_CHECKPOINTS: tuple[Format, ...] = (ORBAX, T5X)
_FILES: tuple[Format, ...] = (TF_BUNDLE, SAFETENSORS, FLAX_MSGPACK)
# A dataset's iterator is a bundle, so that a bundle without a mark comes last.
_UNMARKED: tuple[Format, ...] = (SAFETENSORS, TORCH, TF_BUNDLE)
# Files that say nothing about the directory that they are in.
_LOOSE: tuple[Format, ...] = (GGUF,)
FORMATS: tuple[Format, ...] = (TF_BUNDLE, ORBAX, T5X, FLAX_MSGPACK, SAFETENSORS, TORCH, NPZ, GGUF)


@guarded
def open_checkpoint(
    path: str | os.PathLike[str], *, format: str | None = None, item: str | None = None, limits: Limits | None = None
) -> Checkpoint:
    """Opens a checkpoint: names, shapes and dtypes of its leaves, and no array byte.

    Args:
      path: local, or a URL (`gs://`, `s3://`, `http(s)://`): a TensorFlow bundle (its prefix, its `.index`, or its
        directory); an Orbax item, step or root, T5X's included (of a root, the newest finished step); a T5X or Flax
        msgpack file, or a root of these; a safetensors file or directory; a PyTorch file,
        its index or its directory; an `.npz` file; a GGUF file.
      format: "tf_bundle", "orbax", "t5x", "flax_msgpack", "safetensors", "torch", "npz" or "gguf", where it shall
        not be found out.
      item: the item of an Orbax step to open; with several items and None, names start with the item's.
      limits: on what the files may claim; None for the defaults.

    Returns:
      The open checkpoint, a context manager.

    Raises:
      CheckpointNotFoundError: there is nothing of a known format; the text names what was sought and found.
      ValueError, TypeError: the path is empty, or is no path; `limits` are something else.
      UnsupportedCheckpointError: it is of a format that is not read; the text names it.
      CorruptCheckpointError, UnsafeCheckpointError, LimitExceededError, CheckpointIOError: naming the file.

    Example:
      >>> with ot.open_checkpoint(bundle) as checkpoint:
      ...     checkpoint.format, len(checkpoint.leaves), checkpoint.leaves["shared/embedding"].dtype.name
      ('tf_bundle', 143, 'float32')
    """
    text = path_text(path)
    check_item(item)
    check_limits(limits)
    limits = limits if limits is not None else Limits()
    with opening(limits) as session:
        checkpoint = _open_path(text, format, item, limits)
    checkpoint.also_close(session.close_idle)
    checkpoint.given_path = text
    return checkpoint


def _open_path(text: str, format: str | None, item: str | None, limits: Limits) -> Checkpoint:
    """Opens a path like `open_checkpoint`."""
    if format is not None:
        known = {row.name: row for row in FORMATS}
        if not isinstance(format, str) or format not in known:
            raise for_caller(ValueError(f"format={format!r} is none of {', '.join(map(repr, known))}"))
        return _open(known[format], text, limits, item)
    probe = probe_path(text)
    if probe.kind == "special":
        raise CheckpointNotFoundError("a FIFO, a socket or a device, not a checkpoint", path=text)
    if probe.kind == "directory":
        return _open_directory(probe, item, limits)
    if row := next((row for row in FORMATS if row.recognise(probe)), None):
        return _open(row, probe.path, limits, item)
    if probe.kind == "missing":
        raise missing_error(probe.path, text)
    raise unrecognised_error(probe, FORMATS)


def _open_directory(probe: PathProbe, item: str | None, limits: Limits) -> Checkpoint:
    """Opens a directory by the format that owns it."""
    for row in _CHECKPOINTS:
        if row.recognise(probe):
            return _open(row, probe.path, limits, item)
    steps = _listed_steps(probe.path)
    if any(not files_at(os.path.join(probe.path, step.name)).is_link() for step in steps):
        return _open_path(newest_directory(probe.path, steps), None, item, limits)
    if row := _format_of_files(probe):
        return _open(row, probe.path, limits, item)
    if steps := finished_steps(probe.path):
        return _open_path(newest_directory(probe.path, steps), None, item, limits)
    if newest := newest_file(probe):
        checkpoint = _open_path(files_at(probe.path).locate(newest.name), None, item, limits)
        checkpoint.step = newest.step
        return checkpoint
    if row := next((row for row in _LOOSE if row.recognise_unmarked(probe)), None):
        return _open(row, probe.path, limits, item)
    raise unrecognised_error(probe, FORMATS)


def _listed_steps(directory: str) -> list[Step]:
    """Lists the finished steps of a directory; none where the store lists nothing, or not to this user."""
    files = files_at(directory)
    if not files.can_list:
        return []
    try:
        return finished_steps(directory)
    except CheckpointIOError as error:
        if error.errno != errno.EACCES or not files.is_remote:
            raise
        return []


def _format_of_files(probe: PathProbe) -> Format | None:
    """Returns the format that owns a directory by its files, where it is no checkpoint and no root of such."""
    marked = (row for row in _FILES if row.recognise(probe))
    return next(itertools.chain(marked, (row for row in _UNMARKED if row.recognise_unmarked(probe))), None)


def is_owned(probe: PathProbe) -> bool:
    """Reports whether a directory is a checkpoint as a whole, so that nothing in it is a step."""
    return any(row.recognise(probe) for row in _CHECKPOINTS) or _format_of_files(probe) is not None


def _open(row: Format, path: str, limits: Limits, item: str | None) -> Checkpoint:
    if item is None:
        return row.open(path, limits=limits)
    if row.open_item is None:
        raise UnsupportedCheckpointError(
            f"the item {item!r} was given, but a {row.name} has no items",
            path=path,
            fix=Fix.setting("remove {}", item=item),
        )
    return row.open_item(path, limits=limits, item=item)
