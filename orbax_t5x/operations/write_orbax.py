"""A plan's views as a plain Orbax item."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.handlers.args import TrainStateSave
from orbax_t5x.handlers.checkpoint_handler import TrainStateHandler
from orbax_t5x.handlers.failed_saves import sync_directory
from orbax_t5x.operations.writing import WriteOptions, Written
from orbax_t5x.provenance.records import skipped_from_metadata
from orbax_t5x.readers import Limits, open_checkpoint
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.trees.flat import unflatten

# Orbax walks its trees by recursion, and opening refuses deeper names.
_MOST_LEVELS = Limits.name_levels


def write_orbax(plan: RestorePlan, directory: Path, writing: WriteOptions) -> Written:
    """Writes the item, with the plan's provenance, and counts what can be read of it."""
    args = TrainStateSave(
        _tree(plan),
        writing.dtype,
        provenance=plan.provenance,
        on_unsupported=writing.on_unsupported,
        memory_limit_bytes=writing.memory_limit_bytes,
        progress=writing.progress,
    )
    with ocp.Checkpointer(TrainStateHandler()) as checkpointer:
        checkpointer.save(directory, args=args)
    sync_directory(directory)
    with open_checkpoint(directory) as written:
        skipped = skipped_from_metadata(written.metadata, path=written.path)
        kept = [view for name, view in written.leaves.items() if name not in skipped]
        return Written(len(kept), sum(view.nbytes for view in kept), skipped)


def _tree(plan: RestorePlan) -> dict[str, Any]:
    """The planned views as nested dicts. A TF bundle may have `a` and `a/b`: the longer name then stays joined."""
    views = {entry.name: entry.view for entry in plan.entries}
    for name in views:
        if name.count("/") >= _MOST_LEVELS:
            raise UnsupportedCheckpointError(
                f"a name of {name.count('/') + 1} levels begins {name[:80]!r}; {_MOST_LEVELS} are written at most, so "
                "that they can be opened again"
            )
    try:
        return plan.target.rebuild(views)
    except ValueError:
        return unflatten(views, join_clashes=True)
