"""Explains a leaf of a plan: source, boxes and operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from orbax_t5x.restoring.plan import PlanEntry, RestorePlan
from orbax_t5x.restoring.show.entries import (
    entry_array,
    entry_how,
    entry_reads,
    entry_sharding,
    entry_source,
    entry_why,
    why_text,
)
from orbax_t5x.restoring.show.table import SHOWN_ROWS
from orbax_t5x.text.fold import fold, fold_names
from orbax_t5x.text.wording import array_bytes, array_text, counted, dtype_text, mesh_text, plain, size_text
from orbax_t5x.transforms.patterns.closest import ClosestNames
from orbax_t5x.trees.dtypes import conversion
from orbax_t5x.trees.flat import prefixed

# Boxes and sources listed for one leaf.
_SHOWN_BOXES = 8
_LABEL_WIDTH = 10
_ACTIONS = {
    "read": "read from the checkpoint",
    "value": "a constant that a transform put there",
    "fallback": "which the checkpoint lacks: the fallback gives it",
    "keep": "left as it is",
}
_CONVERSIONS = {
    "same": "",
    "lossless": "every value survives",
    "lossy": "values may be rounded",
    "forbidden": "as asked for",
}


def explain_leaf(plan: RestorePlan, leaf: str) -> str:
    """Explains a target leaf, or a checkpoint leaf's use."""
    parts = [_explain_entry(entry, plan) for entry in plan.entries if entry.name == leaf]
    parts += _explain_stored(plan, leaf)
    if parts:
        return "\n\n".join("\n".join(plain(line) for line in part) for part in parts)
    names = dict.fromkeys([*(entry.name for entry in plan.entries), *_stored(plan)])
    closest = ClosestNames(names).to(leaf)
    hint = f"; closest: {', '.join(closest)}" if closest else ""
    raise KeyError(f"neither the target nor the checkpoint has a leaf {leaf!r}{hint}")


def _labelled(label: str, text: str) -> str:
    return f"  {label:<{_LABEL_WIDTH}}{text}"


def _explain_entry(entry: PlanEntry, plan: RestorePlan) -> list[str]:
    lines = [f"{entry.name}: a leaf of the target, {_ACTIONS[entry.action]}"]
    if entry.dtype is not None:
        lines.append(_labelled("becomes", f"{entry_array(entry)}, {size_text(array_bytes(entry.dtype, entry.shape))}"))
    views = _stored(plan)
    for name in entry.sources[:_SHOWN_BOXES]:
        path = f"  in {_path_of(plan, name)}" if len(plan.checkpoints) > 1 else ""
        array = f"  {array_text(views[name].dtype, views[name].shape)}" if name in views else ""
        lines.append(_labelled("from", f"{name}{array}{path}"))
    if len(entry.sources) > _SHOWN_BOXES:
        lines.append(_labelled("", f"… and {counted(len(entry.sources) - _SHOWN_BOXES, 'source')} more"))
    if entry_how(entry):
        lines.append(_labelled("how", entry_how(entry)))
    if entry.fidelity == "exact":
        lines.append(_labelled("fidelity", "exact: it follows its parameter"))
    if entry.rule:
        lines.append(_labelled("rule", entry.rule))
    elif entry.action == "read":
        lines.append(
            _labelled("rule", "the names match" if entry.sources == (entry.name,) else "a transform put it here")
        )
    if (why := entry_why(entry, plan)) is not None:
        lines.append(_labelled("found", why_text(why)))
    lines += _dtype_lines(entry, [np.dtype(views[name].dtype) for name in entry.sources if name in views])
    if entry_sharding(entry):
        mesh = f" over {mesh_text(entry.sharding)}" if mesh_text(entry.sharding) else ""
        lines.append(_labelled("sharding", entry_sharding(entry) + mesh))
    return [*lines, *_read_lines(entry)]


def _dtype_lines(entry: PlanEntry, dtypes: Iterable[np.dtype]) -> list[str]:
    if entry.dtype is None:
        return []
    wanted = np.dtype(entry.dtype)
    return [
        _labelled("dtype", f"{dtype_text(dtype)} -> {dtype_text(wanted)}: {_CONVERSIONS[conversion(dtype, wanted)]}")
        for dtype in dict.fromkeys(dtypes)
        if dtype != wanted
    ]


def _read_lines(entry: PlanEntry) -> list[str]:
    reads = entry_reads(entry)
    if not reads:
        return []
    total = size_text(entry.bytes_to_read)
    shards = len(entry.boxes())
    lines = [
        _labelled("reads", f"{total} in {counted(len(reads), 'box', 'boxes')} for {counted(shards, 'shard')} here")
    ]
    several = len({name for name, _, _ in reads}) > 1
    for name, box, size in reads[:_SHOWN_BOXES]:
        sides = ", ".join(f"{start}:{stop}" for start, stop in box)
        lines.append(_labelled("", f"[{sides}]  {size_text(size)}" + (f"  of {name}" if several else "")))
    if len(reads) > _SHOWN_BOXES:
        lines.append(_labelled("", f"… and {len(reads) - _SHOWN_BOXES:,} more"))
    return lines


def _stored(plan: RestorePlan) -> dict[str, Any]:
    """Returns all leaves of the checkpoints by the plan's names."""
    return {
        prefixed(prefix, name): view
        for prefix, checkpoint in plan.checkpoints.items()
        for name, view in checkpoint.leaves.items()
    }


def _path_of(plan: RestorePlan, name: str) -> str:
    for prefix, checkpoint in plan.checkpoints.items():
        if not prefix or name == prefix or name.startswith(f"{prefix}/"):
            return checkpoint.path
    return ""


def _explain_stored(plan: RestorePlan, leaf: str) -> list[list[str]]:
    view = _stored(plan).get(leaf)
    if view is None:
        return []
    array = f"{array_text(view.dtype, view.shape)}, {size_text(array_bytes(view.dtype, view.shape))}"
    lines = [f"{leaf}: a leaf of the checkpoint, {array}"]
    if len(plan.checkpoints) > 1:
        lines.append(_labelled("in", _path_of(plan, leaf)))
    for entry in (entry for entry in plan.entries if leaf in entry.sources):
        how = f" ({entry_how(entry)})" if entry_how(entry) else ""
        lines.append(_labelled("goes to", entry.name + how))
    if leaf in plan.unused:
        lines.append(_labelled("unused", "no counterpart in the target; it is left unread"))
    if leaf in plan.dropped:
        lines.append(
            _labelled("dropped", "taken out by a transform, a `...` in the target or an InferenceState; not read")
        )
    return [lines]


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
