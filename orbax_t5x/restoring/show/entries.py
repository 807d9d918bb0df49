"""What a plan says about one of its entries: the array, where it comes from, what is read for it."""

from __future__ import annotations

from orbax_t5x.lazy import Box
from orbax_t5x.restoring.plan_data import PlanEntry
from orbax_t5x.text.fold import fold_names
from orbax_t5x.text.wording import array_text, listed, sharding_text

# Sources of one leaf that are named when they do not fold.
_SHOWN_SOURCES = 2
ACTION_WORDS = {"read": "read", "value": "constant", "fallback": "fallback", "keep": "kept as it is"}


def entry_reads(entry: PlanEntry) -> list[tuple[str, Box, int]]:
    """Stored leaf, box and bytes of what this process reads for one leaf, each once."""
    return [
        (leaf.name, box, leaf.bytes_of((box,))) for leaf, boxes in entry.reads if not leaf.is_value for box in boxes
    ]


def entry_array(entry: PlanEntry) -> str:
    """Dtype and shape; what is no array says so."""
    if entry.dtype is None:
        return "None" if entry.leaf is not None and entry.leaf.kind == "none" else "..."
    key = " key" if entry.leaf is not None and entry.leaf.kind == "key" else ""
    return array_text(entry.dtype, tuple(entry.shape)) + key


def entry_sharding(entry: PlanEntry) -> str:
    """The sharding, or where the leaf lives without one."""
    if entry.sharding is not None:
        return sharding_text(entry.sharding)
    kind = "" if entry.leaf is None else entry.leaf.kind
    return {"jax": "1 device", "key": "1 device", "numpy": "host", "scalar": "host"}.get(kind, "")


def entry_source(entry: PlanEntry) -> str:
    """The names of the stored leaves, folded; what is not read says what it is."""
    if entry.action != "read":
        return ACTION_WORDS[entry.action]
    if len(entry.sources) == 1:
        return entry.sources[0]
    return listed([row.texts[0] for row in fold_names(entry.sources)], _SHOWN_SOURCES, separator=" + ")


def entry_how(entry: PlanEntry) -> str:
    """What happens on the way, casts to the target's dtype and approximations included."""
    # What followed exactly is as it should be; a table full of "exact" would hide the others.
    fidelity = entry.fidelity if entry.fidelity in ("approximate", "reset") else ""
    return ", ".join(text for text in (entry.how, fidelity) if text)
