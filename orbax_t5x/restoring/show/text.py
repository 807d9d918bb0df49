"""A restore plan as people and programs see it: a table, HTML, one leaf explained, two plans compared, JSON.

Nothing here reads an array or changes a plan. Tables fold repeated layers and stop after a few hundred rows; `to_json`
has everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from orbax_t5x.lazy import Box
from orbax_t5x.restoring.plan_data import PlanData, PlanEntry
from orbax_t5x.restoring.show.html import html
from orbax_t5x.restoring.show.rows import (
    SHOWN_ROWS,
    entry_array,
    entry_bytes,
    entry_how,
    entry_reads,
    entry_sharding,
    entry_source,
)
from orbax_t5x.restoring.show.table import table
from orbax_t5x.text.fold import fold, fold_names
from orbax_t5x.text.wording import array_bytes, array_text, counted, dtype_text, mesh_text, plain, size_text
from orbax_t5x.transforms.patterns.closest import closest_names
from orbax_t5x.trees.dtypes import conversion

__all__ = ["diff", "explain", "html", "table", "to_json"]

# Boxes and sources listed for one leaf.
_SHOWN_BOXES = 8
_LABEL_WIDTH = 10


def explain(plan: PlanData, leaf: str) -> str:
    """Where one target leaf comes from and what this process reads for it; what becomes of a leaf of the checkpoint.

    Raises:
      KeyError: neither has the name; the text gives the closest ones.
    """
    parts = [_explain_entry(entry, plan) for entry in plan.entries if entry.name == leaf]
    parts += _explain_stored(plan, leaf)
    if parts:
        return "\n\n".join("\n".join(plain(line) for line in part) for part in parts)
    names = dict.fromkeys([*(entry.name for entry in plan.entries), *_stored(plan)])
    closest = closest_names(leaf, names)
    hint = f"; closest: {', '.join(closest)}" if closest else ""
    raise KeyError(f"neither the target nor the checkpoint has a leaf {leaf!r}{hint}")


def diff(plan: PlanData, other: PlanData) -> str:
    """What the second plan does otherwise than the first, leaf by leaf; empty when nothing."""
    ours, theirs = ({entry.name: entry for entry in one.entries} for one in (plan, other))
    lines = [f"- {name}" for name in _folded(name for name in ours if name not in theirs)]
    lines += [f"+ {name}" for name in _folded(name for name in theirs if name not in ours)]
    changed = [(name, _change(entry, theirs[name])) for name, entry in ours.items() if name in theirs]
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


def to_json(plan: PlanData) -> dict[str, Any]:
    """The plan as data that `json.dumps` takes; bytes are those of this process."""
    return {
        "sources": {
            name: {"path": checkpoint.path, "format": checkpoint.format, "step": checkpoint.step}
            for name, checkpoint in plan.checkpoints.items()
        },
        "entries": [_entry_json(entry) for entry in plan.entries],
        "unused": list(plan.unused),
        "dropped": list(plan.dropped),
        "warnings": list(plan.warnings),
        "provenance": [dict(record) for record in plan.provenance],
        "bytes_to_read": plan.bytes_to_read,
    }


def _entry_json(entry: PlanEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "action": entry.action,
        "sources": list(entry.sources),
        "how": entry_how(entry),
        "rule": entry.rule,
        "fidelity": entry.fidelity,
        "shape": [int(size) for size in entry.shape],
        "dtype": None if entry.dtype is None else np.dtype(entry.dtype).name,
        "kind": None if entry.leaf is None else entry.leaf.kind,
        "sharding": _sharding_json(entry.sharding),
        "bytes": entry_bytes(entry),
    }


def _sharding_json(sharding: Any) -> dict[str, Any] | None:
    if sharding is None:
        return None
    said: dict[str, Any] = {
        "type": type(sharding).__name__,
        "devices": len(sharding.device_set),
        "memory_kind": getattr(sharding, "memory_kind", None),
    }
    spec = getattr(sharding, "spec", None)
    if spec is not None:
        said["spec"] = [list(axis) if isinstance(axis, tuple) else None if axis is None else str(axis) for axis in spec]
        said["mesh"] = {str(name): int(size) for name, size in sharding.mesh.shape.items()}
    return said


# -- one leaf


def _line(label: str, text: str) -> str:
    return f"  {label:<{_LABEL_WIDTH}}{text}"


def _explain_entry(entry: PlanEntry, plan: PlanData) -> list[str]:
    lines = [f"{entry.name}: a leaf of the target, {_WHAT[entry.action]}"]
    if entry.dtype is not None:
        lines.append(_line("becomes", f"{entry_array(entry)}, {size_text(array_bytes(entry.dtype, entry.shape))}"))
    views = _stored(plan)
    for name in entry.sources[:_SHOWN_BOXES]:
        path = f"  in {_path_of(plan, name)}" if len(plan.checkpoints) > 1 else ""
        array = f"  {array_text(views[name].dtype, views[name].shape)}" if name in views else ""
        lines.append(_line("from", f"{name}{array}{path}"))
    if len(entry.sources) > _SHOWN_BOXES:
        lines.append(_line("", f"… and {counted(len(entry.sources) - _SHOWN_BOXES, 'source')} more"))
    if entry_how(entry):
        lines.append(_line("how", entry_how(entry)))
    if entry.fidelity == "exact":
        lines.append(_line("fidelity", "exact: it follows its parameter"))
    if entry.rule:
        lines.append(_line("rule", entry.rule))
    elif entry.action == "read":
        lines.append(_line("rule", "the names match" if entry.sources == (entry.name,) else "a transform put it here"))
    lines += _dtype_lines(entry, [np.dtype(views[name].dtype) for name in entry.sources if name in views])
    if entry_sharding(entry):
        mesh = f" over {mesh_text(entry.sharding)}" if mesh_text(entry.sharding) else ""
        lines.append(_line("sharding", entry_sharding(entry) + mesh))
    return [*lines, *_read_lines(entry)]


_WHAT = {
    "read": "read from the checkpoint",
    "value": "a constant that a transform put there",
    "fallback": "which the checkpoint lacks: the fallback gives it",
    "keep": "left as it is",
}
_KEPT = {"same": "", "lossless": "every value survives", "lossy": "values may be rounded", "forbidden": "as asked for"}


def _dtype_lines(entry: PlanEntry, dtypes: Iterable[np.dtype]) -> list[str]:
    if entry.dtype is None:
        return []
    wanted = np.dtype(entry.dtype)
    return [
        _line("dtype", f"{dtype_text(dtype)} -> {dtype_text(wanted)}: {_KEPT[conversion(dtype, wanted)]}")
        for dtype in dict.fromkeys(dtypes)
        if dtype != wanted
    ]


def _read_lines(entry: PlanEntry) -> list[str]:
    reads = entry_reads(entry)
    if not reads:
        return []
    total = size_text(sum(size for _, _, size in reads))
    shards = len(entry.boxes())
    lines = [_line("reads", f"{total} in {counted(len(reads), 'box', 'boxes')} for {counted(shards, 'shard')} here")]
    several = len({name for name, _, _ in reads}) > 1
    for name, box, size in reads[:_SHOWN_BOXES]:
        lines.append(_line("", f"{_box_text(box)}  {size_text(size)}" + (f"  of {name}" if several else "")))
    if len(reads) > _SHOWN_BOXES:
        lines.append(_line("", f"… and {len(reads) - _SHOWN_BOXES:,} more"))
    return lines


def _box_text(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def _stored(plan: PlanData) -> dict[str, Any]:
    """All leaves of the checkpoints by the names that the plan uses."""
    return {
        (f"{prefix}/{name}" if prefix else name): view
        for prefix, checkpoint in plan.checkpoints.items()
        for name, view in checkpoint.leaves.items()
    }


def _path_of(plan: PlanData, name: str) -> str:
    for prefix, checkpoint in plan.checkpoints.items():
        if not prefix or name.startswith(f"{prefix}/"):
            return checkpoint.path
    return ""


def _explain_stored(plan: PlanData, leaf: str) -> list[list[str]]:
    view = _stored(plan).get(leaf)
    if view is None:
        return []
    array = f"{array_text(view.dtype, view.shape)}, {size_text(array_bytes(view.dtype, view.shape))}"
    lines = [f"{leaf}: a leaf of the checkpoint, {array}"]
    if len(plan.checkpoints) > 1:
        lines.append(_line("in", _path_of(plan, leaf)))
    for entry in (entry for entry in plan.entries if leaf in entry.sources):
        how = f" ({entry_how(entry)})" if entry_how(entry) else ""
        lines.append(_line("goes to", entry.name + how))
    if leaf in plan.unused:
        lines.append(_line("unused", "no place in the target, and strict=False leaves it unread"))
    if leaf in plan.dropped:
        lines.append(_line("dropped", "taken out by a transform, a `...` in the target or an InferenceState; not read"))
    return [lines]


# -- two plans


def _folded(names: Iterable[str]) -> list[str]:
    return [row.label for row in fold_names(names)]


_COMPARED: tuple[tuple[str, Callable[[PlanEntry], str]], ...] = (
    ("action", lambda entry: entry.action),
    ("from", lambda entry: entry_source(entry) if entry.action == "read" else ""),
    ("how", entry_how),
    ("array", entry_array),
    ("sharding", entry_sharding),
)


def _change(entry: PlanEntry, other: PlanEntry) -> str:
    changes = [
        f"{word} {told(entry) or 'nothing'} -> {told(other) or 'nothing'}"
        for word, told in _COMPARED
        if told(entry) != told(other)
    ]
    if entry.sources != other.sources and entry_source(entry) == entry_source(other):
        changes.append(f"other sources behind {entry_source(entry)}")
    return "; ".join(changes)
