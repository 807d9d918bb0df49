"""Compares two plans leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from orbax_t5x.restoring.plan import PlanEntry, RestorePlan
from orbax_t5x.restoring.show.entries import entry_array, entry_how, entry_sharding, entry_source
from orbax_t5x.restoring.show.table import SHOWN_ROWS
from orbax_t5x.text.fold import fold, fold_names
from orbax_t5x.text.wording import counted, plain, size_text

_COMPARED: tuple[tuple[str, Callable[[PlanEntry], str]], ...] = (
    ("action", lambda entry: entry.action),
    ("from", lambda entry: entry_source(entry) if entry.action == "read" else ""),
    ("how", entry_how),
    ("array", entry_array),
    ("sharding", entry_sharding),
)


def plan_diff(plan: RestorePlan, other: RestorePlan) -> str:
    """Lists the differences between two plans, leaf by leaf."""
    first, second = ({entry.name: entry for entry in one.entries} for one in (plan, other))
    lines = [f"- {name}" for name in _folded(name for name in first if name not in second)]
    lines += [f"+ {name}" for name in _folded(name for name in second if name not in first)]
    changed = [(name, _change(entry, second[name])) for name, entry in first.items() if name in second]
    changed = [(name, change) for name, change in changed if change]
    lines += [f"~ {row.label}: {row.texts[1]}" for row in fold(changed)]
    for word in ("unused", "dropped"):
        before, after = (dict.fromkeys(getattr(one, word)) for one in (plan, other))
        lines += [f"  no longer {word}: {name}" for name in _folded(name for name in before if name not in after)]
        lines += [f"  newly {word}: {name}" for name in _folded(name for name in after if name not in before)]
    if len(lines) > SHOWN_ROWS:
        lines[SHOWN_ROWS:] = [f"… and {counted(len(lines) - SHOWN_ROWS, 'line')} more: compare `plan.to_json()`"]
    if lines and plan.bytes_to_read != other.bytes_to_read:
        lines.append(f"this process reads {size_text(plan.bytes_to_read)} -> {size_text(other.bytes_to_read)}")
    return "\n".join(plain(line) for line in lines)


def _folded(names: Iterable[str]) -> list[str]:
    return [row.label for row in fold_names(names)]


def _change(entry: PlanEntry, other: PlanEntry) -> str:
    changes = [
        f"{word} {text_of(entry) or 'nothing'} -> {text_of(other) or 'nothing'}"
        for word, text_of in _COMPARED
        if text_of(entry) != text_of(other)
    ]
    if entry.sources != other.sources and entry_source(entry) == entry_source(other):
        changes.append(f"other sources behind {entry_source(entry)}")
    return "; ".join(changes)
