"""Describes an entry of a plan: array, source and reads."""

from __future__ import annotations

from orbax_t5x.lazy import Box
from orbax_t5x.restoring.plan import PlanEntry, RestorePlan
from orbax_t5x.text.fold import fold_names
from orbax_t5x.text.wording import array_text, listed, sharding_text
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
