"""Records of applied rules in an Orbax item's `_METADATA`, as `custom_metadata`:

    {"orbax_t5x": {
        "provenance": [                          # in the order of application; [] means that nothing was applied
            {"text": "Rename((('a', 'b'),))",    # the rule, for people
             "digest": "3f…",                    # equal for equal rules; null if it cannot be known
             "patterns": ["Rename: a"],          # class and pattern of each of its rules: finds an edited rule
             "source": "teacher",                # the named source to which the rule belongs
             "name": "rename-heads",             # the migration to which the rule belongs
             "auto": true},                      # found by "auto"
            {"unrecorded": true}],               # saved by a program that did not know what had been applied
        "partial": {"…": […]},                   # in place of "provenance": that of each partial save
        "skipped": {                             # leaves that Orbax cannot store, left out on request
            "a/b": {"shape": [0, 4], "dtype": "float32"}}}}

Files are untrusted: a record of another form is an error that names the file, never a guess, because a wrong guess
applies a rule twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.trees.narrow import is_mapping, is_sequence

KEY = "orbax_t5x"
"""The only key under which this package writes into an item's `custom_metadata`."""

Entry = Mapping[str, Any]
"""One applied rule, or the mark of an unrecorded state."""

Lineage = tuple[Entry, ...]
"""All rules that a state has behind it, in order."""

Records = dict[str, Lineage | None]
"""Recorded lineage of each item of a source by name; None for an item without a record."""

UNRECORDED: Entry = {"unrecorded": True}
"""Entry of a save that did not know what had been applied."""

_TEXTS = frozenset({"source", "name"})
_KEYS = frozenset({"text", "digest", "patterns", "auto", *_TEXTS})


def is_unrecorded(entry: Entry) -> bool:
    """Returns True for the entry of a save that did not know what had been applied."""
    return entry.get("unrecorded") is True


def has_unrecorded(lineage: Lineage) -> bool:
    """Returns True if a state was saved without knowledge of what had been applied."""
    return any(map(is_unrecorded, lineage))


def text_of(entry: Entry) -> str:
    """Returns the rule of an entry in a line, after its source and its migration."""
    names = [entry[key] for key in ("source", "name") if key in entry]
    return ": ".join([*names, "rules that nobody recorded" if is_unrecorded(entry) else entry["text"]])


def of_source(name: str, lineage: Lineage) -> Lineage:
    """Returns a checkpoint's lineage as that of a named source."""
    return tuple({**entry, "source": f"{name}/{entry['source']}" if "source" in entry else name} for entry in lineage)


def union(lineages: Iterable[Lineage | None]) -> Lineage:
    """Returns the lineages one after the other, each different one once."""
    return tuple(entry for lineage in _distinct(lineages) for entry in lineage)


def _distinct(lineages: Iterable[Lineage | None]) -> list[Lineage]:
    distinct: list[Lineage] = []
    for lineage in lineages:
        if lineage is not None and lineage not in distinct:
            distinct.append(lineage)
    return distinct


def to_metadata(
    lineage: Sequence[Entry],
    skipped: Mapping[str, tuple[Sequence[int], str]] | None = None,
    *,
    is_partial: bool = False,
) -> dict[str, Any]:
    """Returns the `custom_metadata` of an item."""
    entries = [dict(entry) for entry in lineage]
    recorded: dict[str, Any] = {"provenance": entries}
    if is_partial:  # Orbax merges the metadata of partial saves: each needs a key of its own
        recorded = {"partial": {hashlib.sha256(json.dumps(entries).encode()).hexdigest(): entries}}
    if skipped:
        recorded["skipped"] = {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in skipped.items()}
    return {KEY: recorded}


def from_metadata(metadata: Mapping[str, Any] | None, *, path: str | os.PathLike[str] | None = None) -> Lineage | None:
    """Returns the checked lineage in an item's `custom_metadata`, or None."""
    recorded = _own_record(metadata, path)
    partial = recorded.get("partial")
    if is_mapping(partial):
        lineages = [checked_lineage(entries, path=path) for entries in partial.values()]
        return lineages[0] if len(lineages) == 1 else (UNRECORDED,)
    return checked_lineage(recorded["provenance"], path=path) if "provenance" in recorded else None


def checked_lineage(entries: Any, *, path: str | os.PathLike[str] | None = None) -> Lineage:
    """Returns entries that were read, or raises CorruptCheckpointError."""
    if not is_sequence(entries):
        raise CorruptCheckpointError("the provenance record is not a list", path=path)
    for entry in entries:
        if not is_mapping(entry) or not _has_form(entry):
            raise CorruptCheckpointError(f"malformed provenance record {str(entry)[:200]}", path=path)
    return tuple(dict(entry) for entry in entries)


def given_lineage(entries: Any) -> Lineage:
    """Returns the checked `provenance=` of a save."""
    try:
        return checked_lineage(entries)
    except CorruptCheckpointError:
        shown = str(entries)[:200] if not isinstance(entries, str) else repr(entries[:200])
        raise ValueError(
            f"provenance={shown} is no lineage; pass plan.provenance of a restore, or () where nothing was applied"
        ) from None


def _has_form(entry: Mapping[Any, Any]) -> bool:
    if is_unrecorded(entry):
        return set(entry) <= {"unrecorded", "source"} and isinstance(entry.get("source", ""), str)
    patterns = entry.get("patterns", ())
    return (
        set(entry) <= _KEYS
        and isinstance(entry.get("text"), str)
        and isinstance(entry.get("digest", 0), str | None)
        and entry.get("auto", True) is True
        and all(isinstance(entry[key], str) for key in _TEXTS.intersection(entry))
        and is_sequence(patterns)
        and all(isinstance(pattern, str) for pattern in patterns)
    )


def _own_record(metadata: Mapping[str, Any] | None, path: str | os.PathLike[str] | None) -> Mapping[str, Any]:
    """Returns this package's entry in an item's metadata."""
    custom: Any = metadata or {}
    if KEY not in custom and isinstance(custom.get("custom_metadata"), Mapping):
        custom = custom["custom_metadata"]
    recorded = custom.get(KEY)
    if recorded is None:
        return {}
    if not is_mapping(recorded):
        raise CorruptCheckpointError(f"custom_metadata[{KEY!r}] is not a mapping", path=path)
    return recorded


def skipped_from_metadata(
    metadata: Mapping[str, Any] | None, *, path: str | os.PathLike[str] | None = None
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns shapes and dtypes of left-out leaves, by name."""
    skipped = _own_record(metadata, path).get("skipped", {})
    if not is_mapping(skipped):
        raise CorruptCheckpointError("the record of skipped leaves is not a mapping", path=path)
    leaves: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, entry in skipped.items():
        shape, dtype = (entry.get("shape"), entry.get("dtype")) if is_mapping(entry) else (None, None)
        is_shape = is_sequence(shape) and all(type(size) is int and size >= 0 for size in shape)
        if not (is_shape and isinstance(name, str) and isinstance(dtype, str)):
            raise CorruptCheckpointError("malformed record of a skipped leaf", path=path, leaf=str(name))
        leaves[name] = (tuple(shape or ()), dtype)
    return leaves
