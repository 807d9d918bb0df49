"""Shows the decisions of `broadcast="auto"`.

With the requests and bytes of both ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orbax_t5x.restoring.broadcast.chunks import ReadCounts, ReadDecision
from orbax_t5x.text.wording import counted, leaves_text, size_text


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
