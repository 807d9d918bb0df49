"""Describes an entry of a plan: array, source and reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orbax_t5x.lazy import Box
from orbax_t5x.restoring.broadcast.chunks import ReadCounts, ReadDecision
from orbax_t5x.restoring.plan import PlanEntry, RestorePlan
from orbax_t5x.text.fold import fold_names
from orbax_t5x.text.wording import array_text, counted, leaves_text, listed, sharding_text, size_text
from orbax_t5x.transforms.diagnostics import Why

# Sources of one leaf that are named when they do not fold.
_SHOWN_SOURCES = 2
_REASONS = {
    "given": "as given",
    "name": "by its name",
    "renaming": "by its name after a renaming",
    "structure": "by shapes and structure",
    "pack": "by a rule pack",
    "optimizer": "as its role in the optimizer's state",
}
ACTION_WORDS = {"read": "read", "value": "constant", "fallback": "fallback", "keep": "kept as it is"}


def entry_reads(entry: PlanEntry) -> list[tuple[str, Box, int]]:
    """Lists the stored leaf, box and bytes of an entry's reads."""
    return [
        (leaf.name, box, leaf.bytes_of((box,))) for leaf, boxes in entry.reads if not leaf.is_value for box in boxes
    ]


def entry_array(entry: PlanEntry) -> str:
    """Returns dtype and shape, or None or `...` without an array."""
    if entry.dtype is None:
        return "None" if entry.leaf is not None and entry.leaf.kind == "none" else "..."
    key = " key" if entry.leaf is not None and entry.leaf.kind == "key" else ""
    return array_text(entry.dtype, tuple(entry.shape)) + key


def entry_sharding(entry: PlanEntry) -> str:
    """Returns the sharding, or the device or the host."""
    if entry.sharding is not None:
        return sharding_text(entry.sharding)
    kind = "" if entry.leaf is None else entry.leaf.kind
    return {"jax": "1 device", "key": "1 device", "numpy": "host", "scalar": "host"}.get(kind, "")


def entry_source(entry: PlanEntry) -> str:
    """Returns the stored leaves' names, folded, or the entry's kind."""
    if entry.action != "read":
        return ACTION_WORDS[entry.action]
    if len(entry.sources) == 1:
        return entry.sources[0]
    return listed([row.texts[0] for row in fold_names(entry.sources)], _SHOWN_SOURCES, separator=" + ")


def entry_why(entry: PlanEntry, plan: RestorePlan) -> Why | None:
    """Returns the reason for the leaf that `"auto"` found, or None."""
    return plan.why.get(entry.name) if entry.action == "read" else None


def why_text(why: Why) -> str:
    """Returns a reason in words."""
    return _REASONS[why.kind] + (f" ({why.detail})" if why.detail else "")


def entry_how(entry: PlanEntry) -> str:
    """Returns the operations between stored leaf and target, with casts and approximations."""
    # What followed exactly is as it should be; a table full of "exact" would hide the others.
    fidelity = entry.fidelity if entry.fidelity in ("approximate", "reset") else ""
    return ", ".join(text for text in (entry.how, fidelity) if text)


def decision_data(decision: ReadDecision | None) -> dict[str, Any] | None:
    """Returns a decision as data."""
    if decision is None:
        return None
    return {
        "is_broadcast": decision.is_broadcast,
        "store": decision.store.label,
        "own": _counts_data(decision.own),
        "once": None if decision.once is None else {**_counts_data(decision.once), "bytes_sent": decision.bytes_sent},
    }


def broadcast_totals(decisions: Mapping[str, ReadDecision]) -> dict[str, Any] | None:
    """Returns the counts of all processes together as data."""
    if not decisions:
        return None
    totals = {"leaves_sent": sum(one.is_broadcast for one in decisions.values())}
    return totals | _counts_data(_total(_distinct(decisions)))


def decision_text(decision: ReadDecision) -> str:
    """Describes a decision."""
    own = (
        f"read by each process for itself: {_counts_text(decision.own)} of all together ({decision.store.label} store)"
    )
    if decision.once is None:
        return f"{own}; nothing can be sent"
    once = f"{_counts_text(decision.once)}, {size_text(decision.bytes_sent)} sent"
    if decision.is_broadcast:
        by_each = f"by each for itself {_counts_text(decision.own)}"
        return f"read once and sent: {once} ({decision.store.label} store); {by_each}"
    return f"{own}; once and sent {once}"


def broadcast_text(decisions: Mapping[str, ReadDecision]) -> str:
    """Describes the decisions in a sentence or two."""
    if not decisions:
        return ""
    sent = {name: one for name, one in decisions.items() if one.is_broadcast}
    total = f"All processes together take {_counts_text(_total(_distinct(decisions)))}"
    if not sent:
        return f"{total}; each reads for itself."
    unique = _distinct(sent)
    own = ReadCounts(sum(one.own.requests for one in unique), sum(one.own.nbytes for one in unique))
    stores = ", ".join(dict.fromkeys(one.store.label for one in unique))
    return (
        f"{total}: {leaves_text(len(sent))} ({stores} store) are read once and sent, in {_counts_text(_total(unique))} "
        f"instead of {_counts_text(own)}."
    )


def _distinct(decisions: Mapping[str, ReadDecision]) -> list[ReadDecision]:
    return list({id(one): one for one in decisions.values()}.values())


def _total(decisions: Iterable[ReadDecision]) -> ReadCounts:
    total = ReadCounts(0, 0)
    for one in decisions:
        total = total.plus(one.once if one.is_broadcast and one.once is not None else one.own)
    return total


def _counts_text(counts: ReadCounts) -> str:
    return f"{counted(counts.requests, 'request')} and {size_text(counts.nbytes)}"


def _counts_data(counts: ReadCounts) -> dict[str, int]:
    return {"requests": counts.requests, "bytes": counts.nbytes}
