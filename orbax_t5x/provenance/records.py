"""What was applied when a run was initialised, as it is recorded in a checkpoint: pure functions on JSON values.

An Orbax item carries its record in the `custom_metadata` of its `_METADATA`, under one key:

    {"orbax_t5x": {
        "provenance": [                                    # oldest first; transforms happen once, so usually one entry
            {"source": "/data/model.ckpt-1000000",         # or {"name": path} for several sources
             "format": "tf_bundle",                        # or {"name": format}
             "transforms": "sha256:…",                     # digest of the whole chain; None: nothing was transformed
             "names": ["Translate()"]}],                   # the chain for people
        "skipped": {                                       # leaves that Orbax cannot store, left out on request
            "a/b": {"shape": [0, 4], "dtype": "float32"}}}}

Only the digest decides anything. What is read back was written by others: a record that does not have this form is
an error that names the file, never a guess, because guessing wrong applies a transform twice.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orbax_t5x.errors import CorruptCheckpointError

KEY = "orbax_t5x"
"""The one key under which this package writes into an item's `custom_metadata`."""

Record = dict[str, Any]
"""One entry: `source`, `format`, `transforms` (digest or None), `names`."""


def _function_name(transform: Callable[..., Any]) -> str:
    """The qualified name by which a plain function counts; a `functools.partial` counts as its function."""
    while isinstance(transform, functools.partial):
        transform = transform.func
    named = transform if hasattr(transform, "__qualname__") else type(transform)
    return f"{named.__module__}.{named.__qualname__}"


def _chain(transforms: Any) -> tuple[Any, ...]:
    if transforms is None:
        return ()
    return (transforms,) if callable(transforms) else tuple(transforms)


def transforms_digest(transforms: Any) -> str | None:
    """The digest of a chain of transforms, stable across processes; None for an empty chain.

    Args:
      transforms: one transform, or a sequence of them. An object with a `digest()` method counts by what that
        returns, a plain function by its qualified name.
    """
    chain = _chain(transforms)
    if not chain:
        return None
    digest = hashlib.sha256()
    for transform in chain:
        part = transform.digest() if hasattr(transform, "digest") else f"function:{_function_name(transform)}"
        digest.update(part.encode())
        digest.update(b"\0")
    return f"sha256:{digest.hexdigest()}"


def _name(transform: Any) -> str:
    return transform.describe() if hasattr(transform, "describe") else _function_name(transform)


def make_record(
    source: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]],
    format: str | Mapping[str, str],
    transforms: Any = (),
) -> Record:
    """The record of one application of `transforms` to what `source` holds.

    Args:
      source: the path that was opened, or name -> path for several sources.
      format: the format of the source, or name -> format.
      transforms: the chain that was applied.
    """
    text = (
        {name: os.fspath(path) for name, path in source.items()} if isinstance(source, Mapping) else os.fspath(source)
    )
    return {
        "source": text,
        "format": dict(format) if isinstance(format, Mapping) else format,
        "transforms": transforms_digest(transforms),
        "names": [_name(transform) for transform in _chain(transforms)],
    }


def append(records: Iterable[Record], record: Record) -> list[Record]:
    """The records with one more at the end.

    Reading a checkpoint back without transforms adds nothing to what is known of it, so a record without a digest is
    kept only where it is the first: a run that is resumed a thousand times has the record of its first day.
    """
    known = [dict(entry) for entry in records]
    return known if known and record["transforms"] is None else [*known, dict(record)]


def newest_digest(records: Sequence[Record]) -> str | None:
    """The digest of the last chain that was applied, or None if none ever was."""
    return next((record["transforms"] for record in reversed(records) if record["transforms"] is not None), None)


def to_metadata(
    records: Sequence[Record], skipped: Mapping[str, tuple[Sequence[int], str]] | None = None
) -> dict[str, Any]:
    """The `custom_metadata` entry for an item; empty when there is nothing to say.

    Args:
      records: oldest first.
      skipped: name -> (shape, dtype name) of leaves that were left out because Orbax cannot store them.
    """
    said: dict[str, Any] = {}
    if records:
        said["provenance"] = [dict(record) for record in records]
    if skipped:
        said["skipped"] = {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in skipped.items()}
    return {KEY: said} if said else {}


def _said(metadata: Mapping[str, Any] | None, path: str | os.PathLike[str] | None) -> Mapping[str, Any]:
    """Our entry in the metadata of a checkpoint or in the `custom_metadata` of an item."""
    found: Any = metadata or {}
    if KEY not in found and isinstance(found.get("custom_metadata"), Mapping):
        found = found["custom_metadata"]
    said = found.get(KEY)
    if said is None:
        return {}
    if not isinstance(said, Mapping):
        raise CorruptCheckpointError(f"custom_metadata[{KEY!r}] is not a mapping", path=path)
    return said


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, Mapping) and all(isinstance(part, str) for pair in value.items() for part in pair)
    )


def from_metadata(metadata: Mapping[str, Any] | None, *, path: str | os.PathLike[str] | None = None) -> list[Record]:
    """The records in a checkpoint's metadata, oldest first; empty where there are none.

    Args:
      metadata: `Checkpoint.metadata`, or the `custom_metadata` of an Orbax item.
      path: names the checkpoint in errors.

    Raises:
      CorruptCheckpointError: there is a record, and it does not have the form that this package writes.
    """
    records = _said(metadata, path).get("provenance", [])
    if not isinstance(records, Sequence) or isinstance(records, str):
        raise CorruptCheckpointError("the provenance record is not a list", path=path)
    for record in records:
        good = (
            isinstance(record, Mapping)
            and _is_text(record.get("source"))
            and _is_text(record.get("format"))
            and isinstance(record.get("transforms", 0), str | None)
            and isinstance(record.get("names"), Sequence)
            and all(isinstance(name, str) for name in record["names"])
        )
        if not good:
            raise CorruptCheckpointError(f"malformed provenance record {str(record)[:200]}", path=path)
    return [dict(record) for record in records]


def skipped_from_metadata(
    metadata: Mapping[str, Any] | None, *, path: str | os.PathLike[str] | None = None
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype name) of the leaves that were left out when the item was written.

    Raises:
      CorruptCheckpointError: the record does not have the form that this package writes.
    """
    skipped = _said(metadata, path).get("skipped", {})
    if not isinstance(skipped, Mapping):
        raise CorruptCheckpointError("the record of skipped leaves is not a mapping", path=path)
    result: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, entry in skipped.items():
        shape = entry.get("shape") if isinstance(entry, Mapping) else None
        good = (
            isinstance(entry, Mapping)
            and isinstance(name, str)
            and isinstance(entry.get("dtype"), str)
            and isinstance(shape, Sequence)
            and not isinstance(shape, str)
            and all(type(size) is int and size >= 0 for size in shape)
        )
        if not good:
            raise CorruptCheckpointError("malformed record of a skipped leaf", path=path, leaf=str(name))
        result[name] = (tuple(entry["shape"]), entry["dtype"])
    return result
