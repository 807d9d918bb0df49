"""The lineage of a state, as an Orbax item carries it in the `custom_metadata` of its `_METADATA` under one key:

    {"orbax_t5x": {
        "provenance": [                                    # oldest first; [] says that nothing was ever applied
            {"unrecorded": true},                          # saved by someone who did not know what had been applied
            {"source": "/data/model.ckpt-1000000",         # or {"name": path} for several sources
             "format": "tf_bundle",                        # or {"name": format}
             "transforms": ["Translate()"],                # the rules, for people; null: nothing was applied
             "digest": "sha256:…",                         # of the chain; null: what it does cannot be told
             "is_resuming": true}],                        # where the caller said so: they had been applied already
        "skipped": {                                       # leaves that Orbax cannot store, left out on request
            "a/b": {"shape": [0, 4], "dtype": "float32"}}}}

Version 0.1 wrote `"transforms": digest-or-null` and `"names": [text, …]` instead of the last three; such entries are
read, and passed on, as they are. What is read back was written by others: a record that does not have one of these
forms is an error that names the file, never a guess, because guessing wrong applies a transform twice.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.provenance.chains import ChainRecord
from orbax_t5x.trees.narrow import is_mapping, is_sequence

KEY = "orbax_t5x"
"""The one key under which this package writes into an item's `custom_metadata`."""

Entry = Mapping[str, Any]
"""One entry of a lineage."""

Lineage = tuple[Entry, ...]
"""What happened to a state, oldest first; where there is no record at all, None stands in its place."""

Records = dict[str, Lineage | None]
"""What each item of a source records, by the item's name."""

UNRECORDED: Entry = {"unrecorded": True}
"""The entry of a save that knew nothing of what had been applied."""


def make_entry(
    source: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]],
    format: str | Mapping[str, str],
    chain: ChainRecord,
    *,
    is_resuming: bool | None = None,
) -> Entry:
    """The entry for one initialisation, or for one explicit answer.

    Args:
      source: the path that was opened, or name -> path for several sources.
      format: the format of the source, or name -> format.
      chain: what was applied.
      is_resuming: the caller's answer, where one was given.
    """
    several = isinstance(source, Mapping)
    entry: dict[str, Any] = {
        "source": {name: os.fspath(path) for name, path in source.items()} if several else os.fspath(source),
        "format": dict(format) if isinstance(format, Mapping) else format,
        "transforms": chain.recorded_rules() or None,
        "digest": chain.digest,
    }
    return entry if is_resuming is None else {**entry, "is_resuming": is_resuming}


def extended(known: Lineage | None, given: Lineage | None) -> Lineage:
    """The lineage that a save records.

    Args:
      known: of the run so far; None where nobody knows.
      given: what the caller says. Where it is how the known one begins, the caller repeats what was said at an earlier
        save, and what has been added since stays.
    """
    if given is None:
        return (UNRECORDED,) if known is None else known
    return known if given and known is not None and known[: len(given)] == given else given


# -- what an entry says


def is_unrecorded(entry: Entry) -> bool:
    """Whether the entry says that nobody knows what was applied."""
    return entry.get("unrecorded") is True


def applied_rules(entry: Entry) -> tuple[str, ...]:
    """The rules of an entry as text; empty where nothing was applied."""
    if entry.get("transforms") is None:
        return ()
    return tuple(entry["transforms"] if "digest" in entry else entry["names"])


def has_digest(entry: Entry) -> bool:
    """Whether an entry of applied transforms can be told apart from other chains."""
    if "digest" in entry:
        return entry["digest"] is not None
    return not any(_held_a_function(name) for name in entry["names"])


def has_same_digest(entry: Entry, chain: ChainRecord) -> bool:
    """Whether an entry of applied transforms is one of this chain."""
    if "digest" in entry:
        return chain.digest is not None and entry["digest"] == chain.digest
    return chain.digest_of_version_0_1 is not None and entry.get("transforms") == chain.digest_of_version_0_1


def _held_a_function(name: str) -> bool:
    """Whether a transform that version 0.1 recorded by this name may have held a function, whose arguments it lost.

    Names of functions have no parentheses; those of rule packs have none either. A chain in a chain is not taken apart.
    """
    if name.startswith("Chain(") or "(opaque)" in name or "<l" in name:
        return True
    return "(" not in name and not name.startswith(("rules.", "rules: "))


# -- reading and writing


def to_metadata(
    lineage: Sequence[Mapping[str, Any]] | None, skipped: Mapping[str, tuple[Sequence[int], str]] | None = None
) -> dict[str, Any]:
    """The `custom_metadata` entry for an item; empty when there is nothing to say.

    Args:
      lineage: oldest first; None: nothing is recorded.
      skipped: name -> (shape, dtype name) of leaves that were left out because Orbax cannot store them.
    """
    recorded: dict[str, Any] = {}
    if lineage is not None:
        recorded["provenance"] = [dict(entry) for entry in lineage]
    if skipped:
        recorded["skipped"] = {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in skipped.items()}
    return {KEY: recorded} if recorded else {}


def from_metadata(metadata: Mapping[str, Any] | None, *, path: str | os.PathLike[str] | None = None) -> Lineage | None:
    """The lineage in a checkpoint's metadata, or None where none is recorded.

    Args:
      metadata: `Checkpoint.metadata`, or the `custom_metadata` of an Orbax item.
      path: names the checkpoint in errors.

    Raises:
      CorruptCheckpointError: there is a record, and it does not have the form that this package writes.
    """
    recorded = _recorded(metadata, path)
    return checked_lineage(recorded["provenance"], path=path) if "provenance" in recorded else None


def checked_lineage(entries: Any, *, path: str | os.PathLike[str] | None = None) -> Lineage:
    """Entries that somebody else made, if they have the form that this package writes.

    Raises:
      CorruptCheckpointError: they do not.
    """
    if not is_sequence(entries):
        raise CorruptCheckpointError("the provenance record is not a list", path=path)
    for entry in entries:
        if not is_mapping(entry) or not (_is_unrecorded_form(entry) or _is_entry_form(entry)):
            raise CorruptCheckpointError(f"malformed provenance record {str(entry)[:200]}", path=path)
    return tuple(dict(entry) for entry in entries)


def given_lineage(entries: Any) -> Lineage:
    """The `provenance=` of a save.

    Raises:
      ValueError: it is no lineage.
    """
    try:
        return checked_lineage(entries)
    except CorruptCheckpointError:
        shown = str(entries)[:200] if not isinstance(entries, str) else repr(entries[:200])
        raise ValueError(
            f"provenance={shown} is no lineage; pass plan.provenance of a restore, or () where nothing was applied"
        ) from None


def _is_unrecorded_form(entry: Mapping[str, Any]) -> bool:
    return dict(entry) == UNRECORDED


def _is_entry_form(entry: Mapping[str, Any]) -> bool:
    if not _is_text(entry.get("source")) or not _is_text(entry.get("format")) or "transforms" not in entry:
        return False
    if not isinstance(entry.get("is_resuming"), bool | None):
        return False
    if "digest" in entry:
        return isinstance(entry["digest"], str | None) and (
            entry["transforms"] is None or _is_list_of_texts(entry["transforms"])
        )
    return isinstance(entry["transforms"], str | None) and _is_list_of_texts(entry.get("names"))


def _is_list_of_texts(value: Any) -> bool:
    return is_sequence(value) and all(isinstance(item, str) for item in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (
        is_mapping(value) and all(isinstance(part, str) for pair in value.items() for part in pair)
    )


def _recorded(metadata: Mapping[str, Any] | None, path: str | os.PathLike[str] | None) -> Mapping[str, Any]:
    """Our entry in the metadata of a checkpoint or in the `custom_metadata` of an item."""
    found: Any = metadata or {}
    if KEY not in found and isinstance(found.get("custom_metadata"), Mapping):
        found = found["custom_metadata"]
    recorded = found.get(KEY)
    if recorded is None:
        return {}
    if not is_mapping(recorded):
        raise CorruptCheckpointError(f"custom_metadata[{KEY!r}] is not a mapping", path=path)
    return recorded


def skipped_from_metadata(
    metadata: Mapping[str, Any] | None, *, path: str | os.PathLike[str] | None = None
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype name) of the leaves that were left out when the item was written.

    Raises:
      CorruptCheckpointError: the record does not have the form that this package writes.
    """
    skipped = _recorded(metadata, path).get("skipped", {})
    if not is_mapping(skipped):
        raise CorruptCheckpointError("the record of skipped leaves is not a mapping", path=path)
    result: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, entry in skipped.items():
        shape = entry.get("shape") if is_mapping(entry) else None
        good = (
            is_mapping(entry)
            and isinstance(name, str)
            and isinstance(entry.get("dtype"), str)
            and is_sequence(shape)
            and all(type(size) is int and size >= 0 for size in shape)
        )
        if not good:
            raise CorruptCheckpointError("malformed record of a skipped leaf", path=path, leaf=str(name))
        result[name] = (tuple(entry["shape"]), entry["dtype"])
    return result
