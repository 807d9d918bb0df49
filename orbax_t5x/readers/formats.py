"""`open_checkpoint`: finds a path's format and opens it.

The marks of all formats decide. A directory's own files go before its subfolders and steps. Marks decide, and never the
order of formats: two owners are an error.
"""

from __future__ import annotations

from collections.abc import Callable

from orbax_t5x import on_demand
from orbax_t5x.concurrency import guarded
from orbax_t5x.errors import CheckpointNotFoundError, Fix, UnsupportedCheckpointError, for_caller
from orbax_t5x.files.limits import Limits, check_limits
from orbax_t5x.files.places import files_at, opening
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.detect import (
    PathProbe,
    UserPath,
    check_item,
    owner_by_marks,
    owner_of_directory,
    owner_of_file,
    path_text,
)
from orbax_t5x.readers.format_table import FORMATS, Format, all_formats, format_named
from orbax_t5x.readers.roots import newest_of_root
from orbax_t5x.readers.unrecognised import missing_error, unrecognised_error
from orbax_t5x.text.wording import did_you_mean


@guarded
def open_checkpoint(
    path: UserPath, *, format: str | None = None, item: str | None = None, limits: Limits | None = None
) -> Checkpoint:
    """Opens a checkpoint: names, shapes and dtypes of its leaves.

    No array byte is read.

    Args:
      path: local, or a URL (`gs://`, `s3://`, `http(s)://`): a TensorFlow bundle (its prefix, its `.index`, or its
        directory); an Orbax item, step or root, T5X's included (of a root, the newest finished step); a T5X or Flax
        msgpack file, or a root of these; a safetensors file or directory; a PyTorch file,
        its index or its directory; an `.npz` file; a GGUF file; or a path of a registered format.
      format: "tf_bundle", "orbax", "t5x", "flax_msgpack", "safetensors", "torch", "npz", "gguf" or the name of a
        registered format, where it shall not be found out.
      item: the item of an Orbax step to open; with several items and None, names start with the item's.
      limits: on what the files may claim; None for the defaults.

    Returns:
      The open checkpoint, a context manager.

    Raises:
      CheckpointNotFoundError: there is nothing of a known format; the text names what was sought and found.
      ValueError, TypeError: the path is empty, or is no path; `limits` are something else.
      UnsupportedCheckpointError: the path is of a format that is not read, or two formats own it; the text names them.
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
    with opening(limits):
        checkpoint = _open_path(text, format, item, limits)
    checkpoint.given_path = text
    return checkpoint


def _open_path(text: str, format: str | None, item: str | None, limits: Limits) -> Checkpoint:
    """Opens a path like `open_checkpoint`."""
    if format is not None:
        if not isinstance(format, str) or format not in FORMATS.names():
            known = FORMATS.names()
            hint = did_you_mean(format, known)
            raise for_caller(ValueError(f"format={format!r} is none of {', '.join(map(repr, known))}{hint}"))
        return _open(format_named(format), text, limits, item)
    probe, rows = PathProbe(files_at(text)), all_formats()
    if probe.kind == "special":
        raise CheckpointNotFoundError("a FIFO, a socket or a device, not a checkpoint", path=text)
    if probe.kind == "directory":
        return _open_directory(probe, rows, item, limits)
    if row := owner_of_file(probe, rows):
        return _open(row, probe.path, limits, item)
    raise missing_error(probe, text) if probe.kind == "missing" else unrecognised_error(probe, rows)


def _open_directory(probe: PathProbe, rows: list[Format], item: str | None, limits: Limits) -> Checkpoint:
    """Opens a directory by its files, or its subfolders and steps."""
    row = owner_of_directory(probe, rows)
    if row is None and (newest := newest_of_root(probe)) is not None:
        if newest.format is not None:
            return _open(format_named(newest.format), newest.path, limits, item)
        checkpoint = _open_path(newest.path, None, item, limits)
        checkpoint.step = checkpoint.step if newest.step is None else newest.step
        return checkpoint
    row = row or owner_by_marks(probe, rows, "hint")
    if row is None:
        raise unrecognised_error(probe, rows)
    return _open(row, probe.path, limits, item)


def _open(row: Format, path: str, limits: Limits, item: str | None) -> Checkpoint:
    """Loads a format's module and opens a path."""
    opener: Callable[..., Checkpoint]  # `item=` is for formats with items alone
    opener = on_demand.function(*row.open.split(":")) if isinstance(row.open, str) else row.open
    if item is not None and not row.has_items:
        raise UnsupportedCheckpointError(
            f"the item {item!r} was given, but a {row.name} has no items",
            path=path,
            fix=Fix.setting("remove {}", item=item),
        )
    opened = opener(path, limits=limits) if item is None else opener(path, limits=limits, item=item)
    if not isinstance(opened, Checkpoint):  # by another package's code
        message = f"the format {row.name!r} opens it as {type(opened).__name__}, not as an orbax_t5x.Checkpoint"
        raise UnsupportedCheckpointError(message, path=path)
    return opened
