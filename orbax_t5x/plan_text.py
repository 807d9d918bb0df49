"""A restore plan as people and programs see it: table, HTML, one leaf explained, two plans compared, JSON.

Pure text: nothing here opens a file or changes a plan.
"""

from __future__ import annotations

import difflib
import html as html_escape
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from orbax_t5x.plan import PlanEntry, RestorePlan


def table(plan: RestorePlan) -> str:
    """The plan as a table for people."""
    lines = [_row(entry) for entry in plan.entries]
    lines += [f"unused: {name}" for name in plan.unused]
    lines += [f"dropped: {name}" for name in plan.dropped]
    lines += [f"warning: {text}" for text in plan.warnings]
    return "\n".join([*lines, f"{len(plan.entries)} leaves, {plan.bytes_to_read:,} bytes to read"])


def html(plan: RestorePlan) -> str:
    """The plan as HTML for notebooks."""
    return f"<pre>{html_escape.escape(table(plan))}</pre>"


def explain(plan: RestorePlan, leaf: str) -> str:
    """Where a target leaf comes from, or what becomes of a checkpoint's leaf."""
    for entry in plan.entries:
        if entry.name == leaf:
            return _row(entry) + (f"\nrule: {entry.rule}" if entry.rule else "")
    users = [entry.name for entry in plan.entries if leaf in entry.sources]
    if users:
        return f"{leaf}: read for {', '.join(users)}"
    if leaf in plan.unused:
        return f"{leaf}: unused"
    if leaf in plan.dropped:
        return f"{leaf}: dropped"
    names = [*(entry.name for entry in plan.entries), *plan.unused, *plan.dropped]
    raise KeyError(f"no leaf {leaf!r}; closest: {', '.join(difflib.get_close_matches(leaf, names))}")


def diff(plan: RestorePlan, other: RestorePlan) -> str:
    """The leaves that two plans treat differently; empty when there are none."""
    ours, theirs = ({entry.name: _row(entry) for entry in one.entries} for one in (plan, other))
    names = dict.fromkeys([*ours, *theirs])
    lines = [
        f"{sign} {rows[name]}"
        for name in names
        if ours.get(name) != theirs.get(name)
        for sign, rows in (("-", ours), ("+", theirs))
        if name in rows
    ]
    return "\n".join(lines)


def to_json(plan: RestorePlan) -> dict[str, Any]:
    """The plan as data."""
    return {
        "entries": [
            {
                "name": entry.name,
                "sources": list(entry.sources),
                "shape": list(entry.shape),
                "dtype": None if entry.dtype is None else np.dtype(entry.dtype).name,
                "sharding": None if entry.sharding is None else str(entry.sharding),
                "action": entry.action,
                "how": entry.how,
                "rule": entry.rule,
            }
            for entry in plan.entries
        ],
        "unused": list(plan.unused),
        "dropped": list(plan.dropped),
        "warnings": list(plan.warnings),
        "provenance": [dict(record) for record in plan.provenance],
        "bytes_to_read": plan.bytes_to_read,
    }


def _row(entry: PlanEntry) -> str:
    dtype = "" if entry.dtype is None else np.dtype(entry.dtype).name
    source = f" <- {', '.join(entry.sources)}" if entry.sources else ""
    how = f" ({entry.how})" if entry.how else ""
    return f"{entry.name}: {entry.action} {dtype}{list(entry.shape)}{source}{how}"
