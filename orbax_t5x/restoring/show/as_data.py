"""Plans as data for programs: complete, with nothing folded."""

from __future__ import annotations

from typing import Any

import numpy as np

from orbax_t5x.restoring.plan import PlanEntry, RestorePlan
from orbax_t5x.restoring.show.entries import entry_how, entry_why
from orbax_t5x.restoring.show.filled import parameter_counts
from orbax_t5x.text.code import code_of
from orbax_t5x.trees.narrow import is_tuple


def to_json(plan: RestorePlan) -> dict[str, Any]:
    """Returns the plan as data that `json.dumps` takes."""
    made = plan.migrations
    return {
        "sources": {
            name: {"path": checkpoint.path, "format": checkpoint.format, "step": checkpoint.step}
            for name, checkpoint in plan.checkpoints.items()
        },
        "entries": [
            {**_entry_json(entry), "why": None if (why := entry_why(entry, plan)) is None else why._asdict()}
            for entry in plan.entries
        ],
        "model_parameters": parameter_counts(plan)._asdict(),
        "filled": list(plan.filled),
        "unused": list(plan.unused),
        "dropped": list(plan.dropped),
        "warnings": list(plan.warnings),
        "found_rules": [code_of(one) for one in plan.found_rules],
        "migrations": None if made is None else {"before": list(made.before), "now": list(made.now)},
        "provenance": [dict(record) for record in plan.provenance],
        "bytes_to_read": plan.bytes_to_read,
        "bytes_read_at_planning": plan.bytes_read_at_planning,
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
        "bytes": entry.bytes_to_read,
    }


def _sharding_json(sharding: Any) -> dict[str, Any] | None:
    if sharding is None:
        return None
    described: dict[str, Any] = {
        "type": type(sharding).__name__,
        "devices": len(sharding.device_set),
        "memory_kind": getattr(sharding, "memory_kind", None),
    }
    spec = getattr(sharding, "spec", None)
    if spec is not None:
        described["spec"] = [None if axis is None else list(axis) if is_tuple(axis) else str(axis) for axis in spec]
        described["mesh"] = {str(name): int(size) for name, size in sharding.mesh.shape.items()}
    return described
