"""Records of a state's lineage in an Orbax item's `_METADATA`, as `custom_metadata`:

    {"orbax_t5x": {
        "provenance": [                                    # oldest first; [] means that nothing was ever applied
            {"unrecorded": true},                          # saved by someone who did not know what had been applied;
                                                           # "source" is the name of one source that this is about
            {"source": "/data/model.ckpt-1000000",         # or {"name": path} for several sources
             "format": "tf_bundle",                        # or {"name": format}
             "transforms": ["Translate()"],                # the rules, for people; null: nothing was applied
             "digest": "sha256:…",                         # of the chain; null where it has none
             "steps": [{"digest": "…", "rules": 1}],       # of each transform: its digest, and how many rules it has;
                                                           # of a migration also "name", and "parts": digests of its
                                                           # rules; of a named source "source", and its rules as "steps"
             "continues": true,                            # where these are the rest of a longer list
             "is_resuming": true}],                        # where the caller passed it: applied already
        "partial": {"…": […]},                             # in place of "provenance": that of each partial save
        "skipped": {                                       # leaves that Orbax cannot store, left out on request
            "a/b": {"shape": [0, 4], "dtype": "float32"}}}}

What is read back was written by others: a record that does not have this form is an error that names the file, never a
guess, because guessing wrong applies a transform twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.provenance.chains import RuleRecord, Rules, digest_of_rules, texts_of
from orbax_t5x.trees.narrow import is_mapping, is_sequence

KEY = "orbax_t5x"
"""The one key under which this package writes into an item's `custom_metadata`."""

Entry = Mapping[str, Any]
"""One entry of a lineage."""

Lineage = tuple[Entry, ...]
"""Entries of what was applied to a state, oldest first; without any record it is None."""

Records = dict[str, Lineage | None]
"""The lineage that each item of a source records, by the item's name."""

UNRECORDED: Entry = {"unrecorded": True}
"""The entry of a save that knew nothing of what had been applied."""

# Each step has a record: more rules are cut, and compared only as a whole.
_RECORDED_RULES = 500


def make_entry(
    source: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]],
    format: str | Mapping[str, str],
    chain: Rules,
    *,
    is_resuming: bool | None = None,
    continues: bool = False,
) -> Entry:
    """Makes the entry for an initialisation, a rest, or an answer."""
    several = isinstance(source, Mapping)
    entry: dict[str, Any] = {
        "source": {name: os.fspath(path) for name, path in source.items()} if several else os.fspath(source),
        "format": dict(format) if isinstance(format, Mapping) else format,
        "transforms": recorded_texts(chain) or None,
        "digest": digest_of_rules(chain),
    }
    if chain and len(texts_of(chain)) <= _RECORDED_RULES:
        entry["steps"] = list(map(_step, chain))
    if continues:
        entry["continues"] = True
    return entry if is_resuming is None else {**entry, "is_resuming": is_resuming}


def _step(rule: RuleRecord) -> dict[str, Any]:
    step: dict[str, Any] = {"digest": rule.digest, "rules": len(rule.texts)}
    if rule.name:
        step |= {"name": rule.name, "parts": [one.digest for one in rule.inner]}
    return step | {"source": rule.source, "steps": list(map(_step, rule.inner))} if rule.source else step


def recorded_texts(chain: Rules) -> list[str]:
    """Returns a chain's first 500 texts, and the number of more."""
    texts = texts_of(chain)
    more = len(texts) - _RECORDED_RULES
    return [*texts[:_RECORDED_RULES], f"… and {more} more"] if more > 0 else texts


def extended_lineage(known: Lineage | None, given: Lineage | None) -> Lineage:
    """Returns the lineage that a save records.

    Where the known one begins with `given`, the caller repeats what was passed at an earlier save, and what has been
    added since stays.
    """
    if given is None:
        return (UNRECORDED,) if known is None else known
    return known if given and known is not None and known[: len(given)] == given else given


# -- single entries


def is_unrecorded(entry: Entry) -> bool:
    """Tests for the entry of a save without knowledge.

    That of a single source is about its own rules alone.
    """
    return entry.get("unrecorded") is True and "source" not in entry


def applied_rules(entry: Entry) -> tuple[str, ...]:
    """Returns the rules of an entry as text, if any."""
    return tuple(entry.get("transforms") or ())


def same_history(one: Lineage, other: Lineage) -> bool:
    """Tests if two lineages record the same transforms.

    Entries that only answer "applied already" do not count: they changed no value.
    """
    histories = [
        [
            (entry.get("digest"), applied_rules(entry), is_unrecorded(entry))
            for entry in lineage
            if is_unrecorded(entry) or (applied_rules(entry) and not entry.get("is_resuming"))
        ]
        for lineage in (one, other)
    ]
    return histories[0] == histories[1]


# -- reading and writing


def to_metadata(
    lineage: Sequence[Mapping[str, Any]] | None,
    skipped: Mapping[str, tuple[Sequence[int], str]] | None = None,
    *,
    is_partial: bool = False,
) -> dict[str, Any]:
    """Makes the `custom_metadata` entry for an item, or an empty mapping."""
    recorded: dict[str, Any] = {}
    if lineage is not None:
        recorded["provenance"] = [dict(entry) for entry in lineage]
        if is_partial:
            recorded["partial"] = {
                hashlib.sha256(json.dumps(recorded).encode()).hexdigest(): recorded.pop("provenance")
            }
    if skipped:
        recorded["skipped"] = {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in skipped.items()}
    return {KEY: recorded} if recorded else {}


def from_metadata(metadata: Mapping[str, Any] | None, *, path: str | os.PathLike[str] | None = None) -> Lineage | None:
    """Returns the checked lineage in an item's `custom_metadata`, or None."""
    recorded = _own_record(metadata, path)
    partial = recorded.get("partial")
    if is_mapping(partial):
        lineages = [checked_lineage(entries, path=path) for entries in partial.values()]
        return lineages[0] if len(lineages) == 1 else (UNRECORDED,)
    return checked_lineage(recorded["provenance"], path=path) if "provenance" in recorded else None


def checked_lineage(entries: Any, *, path: str | os.PathLike[str] | None = None) -> Lineage:
    """Checks the form of entries that were read or passed."""
    if not is_sequence(entries):
        raise CorruptCheckpointError("the provenance record is not a list", path=path)
    for entry in entries:
        if not is_mapping(entry) or not _is_entry_form(entry):
            raise CorruptCheckpointError(f"malformed provenance record {str(entry)[:200]}", path=path)
    return tuple(dict(entry) for entry in entries)


def given_lineage(entries: Any) -> Lineage:
    """Checks the `provenance=` of a save."""
    try:
        return checked_lineage(entries)
    except CorruptCheckpointError:
        shown = str(entries)[:200] if not isinstance(entries, str) else repr(entries[:200])
        raise ValueError(
            f"provenance={shown} is no lineage; pass plan.provenance of a restore, or () where nothing was applied"
        ) from None


def _is_entry_form(entry: Mapping[str, Any]) -> bool:
    if entry.get("unrecorded") is True:
        return set(entry) <= {"unrecorded", "source"} and isinstance(entry.get("source", ""), str)
    return (
        all(map(_is_text_or_texts, (entry.get("source"), entry.get("format"))))
        and _are_texts(() if entry.get("transforms", 0) is None else entry.get("transforms"))
        and isinstance(entry.get("digest", 0), str | None)
        and isinstance(entry.get("is_resuming"), bool | None)
        and isinstance(entry.get("continues", False), bool)
        and (entry.get("steps") is None or _are_steps(entry["steps"], len(entry["transforms"] or ())))
    )


def _are_steps(steps: Any, count: int, *, of_source: bool = False) -> bool:
    """Tests if steps cover so many texts."""
    return (
        is_sequence(steps)
        and all(is_mapping(one) and isinstance(one.get("digest", 0), str | None) for one in steps)
        and all(type(one.get("rules")) is int and one["rules"] > 0 for one in steps)
        and all(isinstance(one.get("name"), str | None) and is_sequence(one.get("parts", ())) for one in steps)
        and all(isinstance(one["source"], str) and not of_source for one in steps if "source" in one)
        and all(_are_steps(one.get("steps"), one["rules"], of_source=True) for one in steps if "source" in one)
        and sum(one["rules"] for one in steps) == count
    )


def _are_texts(value: Any) -> bool:
    return is_sequence(value) and all(isinstance(item, str) for item in value)


def _is_text_or_texts(value: Any) -> bool:
    return isinstance(value, str) or (
        is_mapping(value) and all(isinstance(text, str) for pair in value.items() for text in pair)
    )


def _own_record(metadata: Mapping[str, Any] | None, path: str | os.PathLike[str] | None) -> Mapping[str, Any]:
    """Returns our entry in metadata."""
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
    """Returns shapes and dtypes of left-out leaves, by name."""
    skipped = _own_record(metadata, path).get("skipped", {})
    if not is_mapping(skipped):
        raise CorruptCheckpointError("the record of skipped leaves is not a mapping", path=path)
    result: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, entry in skipped.items():
        shape, dtype = (entry.get("shape"), entry.get("dtype")) if is_mapping(entry) else (None, None)
        is_shape = is_sequence(shape) and all(type(size) is int and size >= 0 for size in shape)
        if not (is_shape and isinstance(name, str) and isinstance(dtype, str)):
            raise CorruptCheckpointError("malformed record of a skipped leaf", path=path, leaf=str(name))
        result[name] = (tuple(shape or ()), dtype)
    return result
