"""Checkpoints of every format are opened here: `open_checkpoint` finds the format and its reader, `latest_step` the
newest step.

The formats stand in one ordered table; each has a recogniser, a pure function of what was seen at the path (names and a
few bytes), and an opener. The first that recognises the path opens it; where none does, the error says what was looked
for and what was found.
"""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Callable
from typing import NamedTuple

from orbax_t5x.errors import CheckpointError, CheckpointNotFoundError, UnsupportedCheckpointError
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.detect.foreign import foreign_format
from orbax_t5x.readers.detect.probe import (
    Sighting,
    is_bundle_state,
    is_msgpack_map,
    is_old_t5x_msgpack,
    is_safetensors,
    is_sstable,
    is_t5x_msgpack,
    look,
)
from orbax_t5x.readers.flax_msgpack.open import HUB_FILE, open_flax_msgpack
from orbax_t5x.readers.orbax.open import open_orbax
from orbax_t5x.readers.orbax.steps import (
    MANIFEST_FILE,
    MSGPACK_FILE,
    finished_steps,
    is_item,
    is_step_directory,
    newest_directory,
)
from orbax_t5x.readers.safetensors.open import open_safetensors
from orbax_t5x.readers.t5x.open import open_t5x
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.storage.limits import Limits
from orbax_t5x.text.wording import listed

__all__ = ["Checkpoint", "Limits", "latest_step", "open_checkpoint"]

_SHARD_NAME = re.compile(r"(?P<prefix>.+)\.data-[0-9]{5}-of-[0-9]{5}", re.ASCII | re.DOTALL)
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")
# A model of the Hugging Face hub: an organisation and a name.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Names of a directory that an error shows.
_SHOWN_NAMES = 8
# Names close to one that does not exist: more than three are no help, and looser ones are other files.
_SHOWN_NEIGHBOURS = 3
_CLOSE = 0.8


class _Format(NamedTuple):
    """One row of the table.

    Attributes:
      name: the value of `Checkpoint.format` and of the argument `format`.
      sought: what the recogniser looks for, for errors.
      recognise: whether what was seen is of this format.
      open: opens the path, with limits and the item that was asked for.
    """

    name: str
    sought: str
    recognise: Callable[[Sighting], bool]
    open: Callable[[str, Limits, str | None], Checkpoint]


def _is_tf_bundle(seen: Sighting) -> bool:
    """By names, so that a bundle whose index is damaged is still one."""
    if seen.kind == "directory":
        if MSGPACK_FILE in seen.names and is_bundle_state(seen.inside(MSGPACK_FILE)):
            return True
        prefixes = {match["prefix"] for name in seen.names if (match := _SHARD_NAME.fullmatch(name))}
        return any(f"{prefix}.index" in seen.names for prefix in prefixes) or any(
            is_sstable(seen.inside(name)) for name in seen.with_suffix(".index")
        )
    if seen.kind == "file" and (seen.path.endswith(".index") or is_bundle_state(seen)):
        return True
    match = _SHARD_NAME.fullmatch(seen.path)
    return os.path.isfile(f"{match['prefix'] if match else seen.path}.index")


def _open_tf_bundle(path: str, limits: Limits, item: str | None) -> Checkpoint:
    _refuse_item("tf_bundle", path, item)
    return open_tf_bundle(path, limits=limits)


def _is_orbax(seen: Sighting) -> bool:
    if seen.kind != "directory":
        return False
    return (
        MANIFEST_FILE in seen.names
        or is_item(seen.path)
        or is_step_directory(seen.path)
        or (MSGPACK_FILE in seen.names and is_msgpack_map(seen.inside(MSGPACK_FILE)) and not _is_t5x(seen))
    )


def _open_orbax(path: str, limits: Limits, item: str | None) -> Checkpoint:
    return open_orbax(path, limits=limits, item=item)


def _is_t5x(seen: Sighting) -> bool:
    if seen.kind == "directory":
        return MSGPACK_FILE in seen.names and _is_t5x_file(seen.inside(MSGPACK_FILE))
    return is_t5x_msgpack(seen)


def _is_t5x_file(seen: Sighting) -> bool:
    return is_t5x_msgpack(seen) or is_old_t5x_msgpack(seen)


def _open_t5x(path: str, limits: Limits, item: str | None) -> Checkpoint:
    _refuse_item("t5x", path, item)
    return open_t5x(path, limits=limits)


def _is_flax_msgpack(seen: Sighting) -> bool:
    if seen.kind == "directory":
        # Of a directory that Hugging Face saved in several formats, the safetensors are read.
        return HUB_FILE in seen.names and not _is_safetensors(seen)
    return is_msgpack_map(seen)


def _open_flax_msgpack(path: str, limits: Limits, item: str | None) -> Checkpoint:
    _refuse_item("flax_msgpack", path, item)
    return open_flax_msgpack(path, limits=limits)


def _is_safetensors(seen: Sighting) -> bool:
    if seen.kind == "directory":
        return bool(seen.with_suffix(".safetensors") or seen.with_suffix(".safetensors.index.json"))
    return is_safetensors(seen) or (seen.kind == "file" and seen.path.endswith(".safetensors.index.json"))


def _open_safetensors(path: str, limits: Limits, item: str | None) -> Checkpoint:
    _refuse_item("safetensors", path, item)
    return open_safetensors(path, limits=limits)


_FORMATS = (
    _Format("tf_bundle", "a TensorFlow bundle (prefix.index, prefix.data-…)", _is_tf_bundle, _open_tf_bundle),
    _Format("orbax", "an Orbax item or step (_METADATA, _CHECKPOINT_METADATA)", _is_orbax, _open_orbax),
    _Format("t5x", "a T5X step (a msgpack file 'checkpoint')", _is_t5x, _open_t5x),
    _Format("flax_msgpack", "a Flax msgpack file", _is_flax_msgpack, _open_flax_msgpack),
    _Format("safetensors", "safetensors files", _is_safetensors, _open_safetensors),
)


def _refuse_item(format: str, path: str, item: str | None) -> None:
    if item is not None:
        raise UnsupportedCheckpointError(f"item={item!r} was asked for, but a {format} has no items", path=path)


def _local_path(path: str | os.PathLike[str]) -> str:
    """The path as text, with `~` expanded.

    Raises:
      TypeError: it is no path.
      CheckpointNotFoundError: it is empty.
      UnsupportedCheckpointError: it is a URL.
    """
    if isinstance(path, (list, tuple)):
        raise TypeError(
            f"one path is opened at a time, and this is a {type(path).__name__} of {len(path)}; several sources are a "
            "dict of names and paths, given to `restore`"
        )
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"the path {path!r} is not text")
    if not text:
        raise CheckpointNotFoundError("the path is empty; '.' is the working directory", path=text)
    if match := _URL.match(text):
        raise UnsupportedCheckpointError(
            f"{match['scheme']}:// paths are not read yet; copy the checkpoint to a local directory", path=text
        )
    return os.path.expanduser(text)


def _missing(path: str, text: str) -> CheckpointNotFoundError:
    """Why nothing is at a path, with what its user may have meant.

    Args:
      path: absolute.
      text: as the user gave it.
    """
    message = "no such file or directory, and no TensorFlow bundle with this prefix"
    if close := _neighbours(path):
        message += f"; beside it: {', '.join(map(repr, close))}"
    elif _HUB_NAME.fullmatch(text):
        message += (
            f"; for a model of the Hugging Face hub, open what `huggingface_hub.snapshot_download({text!r})` returns"
        )
    return CheckpointNotFoundError(message, path=path)


def _neighbours(path: str) -> list[str]:
    """Names beside a path that are close to its own: bundles by their prefix."""
    directory, name = os.path.split(path)
    names = {entry.removesuffix(".index") for entry in look(directory).names if not _SHARD_NAME.fullmatch(entry)}
    return difflib.get_close_matches(name, sorted(names), n=_SHOWN_NEIGHBOURS, cutoff=_CLOSE)


def open_checkpoint(
    path: str | os.PathLike[str], *, format: str | None = None, item: str | None = None, limits: Limits | None = None
) -> Checkpoint:
    """Opens a checkpoint: names, shapes and dtypes of its leaves, and no array byte.

    Args:
      path: a TensorFlow bundle (its prefix, its `.index`, or its directory); an Orbax item, step or root, T5X's
        included (of a root, the newest finished step); a safetensors file or directory.
      format: "tf_bundle", "orbax", "safetensors", "t5x" or "flax_msgpack", where it shall not be found out.
      item: the item of an Orbax step to open; with several items and None, names start with the item's.
      limits: on what the files may claim; None for the defaults.

    Returns:
      The open checkpoint, a context manager.

    Raises:
      CheckpointNotFoundError: there is nothing of a known format; the text says what was looked for and found.
      ValueError, TypeError: the path is empty, or is no path.
      UnsupportedCheckpointError: it is of a format that is not read; the text says what it is.
      CorruptCheckpointError, UnsafeCheckpointError, LimitExceededError, CheckpointIOError: naming the file.
    """
    text = _local_path(path)
    limits = limits if limits is not None else Limits()
    if format is not None:
        known = {row.name: row for row in _FORMATS}
        if format not in known:
            raise ValueError(f"format={format!r} is none of {', '.join(map(repr, known))}")
        return known[format].open(text, limits, item)
    seen = look(text)
    if seen.kind == "special":
        raise CheckpointNotFoundError("a FIFO, a socket or a device, not a checkpoint", path=text)
    for row in _FORMATS:
        if row.recognise(seen):
            return row.open(text if row.name == "tf_bundle" else seen.path, limits, item)
    if seen.kind == "directory" and (steps := finished_steps(seen.path)):
        return open_checkpoint(newest_directory(seen.path, steps), item=item, limits=limits)
    if seen.kind == "missing":
        raise _missing(seen.path, text)
    raise _unknown(seen)


def _unknown(seen: Sighting) -> CheckpointError:
    """Why nothing could open a path."""
    if (foreign := foreign_format(seen)) is not None:
        return UnsupportedCheckpointError(foreign, path=seen.path)
    sought = "; ".join(row.sought for row in _FORMATS)
    if seen.kind == "directory":
        shown = listed(sorted(seen.names), _SHOWN_NAMES)
        message = f"no checkpoint here: looked for {sought}; a root with finished steps; found {shown or 'nothing'}"
        return CheckpointNotFoundError(message, path=seen.path)
    return UnsupportedCheckpointError(
        f"not a checkpoint of a known format: looked for {sought}; the file has {seen.size} bytes and begins with "
        f"{seen.head[:16]!r}",
        path=seen.path,
    )


def latest_step(root: str | os.PathLike[str], *, validated: bool = False) -> int | None:
    """The newest finished step of a root: of Orbax, of T5X through Orbax, or of T5X itself.

    Temporary, empty and half-deleted directories are no steps; step 0 is one.

    Args:
      root: a local directory; one that does not exist has no steps.
      validated: open each step, newest first, and skip those that do not open or have a damaged leaf, with a warning.

    Returns:
      The step's number, or None where there is none.
    """
    seen = look(_local_path(root))
    if seen.kind != "directory":
        return None
    steps = finished_steps(seen.path)
    if not validated:
        return steps[-1].step if steps else None
    for step in reversed(steps):
        path = os.path.join(seen.path, step.name)
        problem = _problem_of(path)
        if problem is None:
            return step.step
        warnings.warn(f"step {step.step} is skipped: {problem}", stacklevel=2)
    return None


def _problem_of(path: str) -> CheckpointError | None:
    """What is wrong with a step, as far as opening it shows."""
    try:
        with open_checkpoint(path) as checkpoint:
            broken = (leaf.error for view in checkpoint.leaves.values() for leaf in view.leaves())
            return next((error for error in broken if error is not None), None)
    except CheckpointError as error:
        return error
