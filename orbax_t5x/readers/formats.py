"""The ordered table of formats, and `open_checkpoint`, which looks a path up in it.

Each row has a recogniser, a function of what was found at the path (names and a few bytes), and an opener. The first
row that recognises the path opens it; where none does, the error names what was sought and found.
"""

from __future__ import annotations

import os

from orbax_t5x.errors import CheckpointNotFoundError, Fix, UnsupportedCheckpointError
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.detect.format import Format
from orbax_t5x.readers.detect.probe import probe_path
from orbax_t5x.readers.detect.user_path import check_item, path_text
from orbax_t5x.readers.flax_msgpack.format import FORMAT as FLAX_MSGPACK
from orbax_t5x.readers.orbax.format import FORMAT as ORBAX
from orbax_t5x.readers.orbax.steps import finished_steps, newest_directory
from orbax_t5x.readers.safetensors.format import FORMAT as SAFETENSORS
from orbax_t5x.readers.t5x.format import FORMAT as T5X
from orbax_t5x.readers.tf_bundle.format import FORMAT as TF_BUNDLE
from orbax_t5x.readers.unrecognised import missing, unrecognised
from orbax_t5x.storage.limits import Limits, check_limits
from orbax_t5x.storage.remote.connection import remote_session

FORMATS: tuple[Format, ...] = (TF_BUNDLE, ORBAX, T5X, FLAX_MSGPACK, SAFETENSORS)


def open_checkpoint(
    path: str | os.PathLike[str], *, format: str | None = None, item: str | None = None, limits: Limits | None = None
) -> Checkpoint:
    """Opens a checkpoint: names, shapes and dtypes of its leaves, and no array byte.

    Args:
      path: local, or a URL (`gs://`, `s3://`, `http(s)://`): a TensorFlow bundle (its prefix, its `.index`, or its
        directory); an Orbax item, step or root, T5X's included (of a root, the newest finished step); a T5X or Flax
        msgpack file; a safetensors file or directory.
      format: "tf_bundle", "orbax", "safetensors", "t5x" or "flax_msgpack", where it shall not be found out.
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
    with remote_session(limits):
        checkpoint = _open_path(text, format, item, limits)
    checkpoint.given_path = text
    return checkpoint


def _open_path(text: str, format: str | None, item: str | None, limits: Limits) -> Checkpoint:
    """Opens a path like `open_checkpoint`."""
    if format is not None:
        known = {row.name: row for row in FORMATS}
        if format not in known:
            raise ValueError(f"format={format!r} is none of {', '.join(map(repr, known))}")
        return _open(known[format], text, limits, item)
    probe = probe_path(text)
    if probe.kind == "special":
        raise CheckpointNotFoundError("a FIFO, a socket or a device, not a checkpoint", path=text)
    for row in FORMATS:
        if row.recognise(probe):
            return _open(row, probe.path, limits, item)
    if probe.kind == "directory" and (steps := finished_steps(probe.path)):
        return _open_path(newest_directory(probe.path, steps), None, item, limits)
    if probe.kind == "missing":
        raise missing(probe.path, text)
    raise unrecognised(probe, FORMATS)


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
