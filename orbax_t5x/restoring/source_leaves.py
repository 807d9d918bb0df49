"""Leaves of the checkpoints of a restore, under one name each, before any transform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.readers import Checkpoint
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.trees.flat import prefixed


def source_leaves(checkpoints: Mapping[str, Checkpoint], diagnostics: Diagnostics) -> dict[str, Any]:
    """Returns all leaves by name, and None where a checkpoint has None; those of several sources have prefixes."""
    if len(checkpoints) == 1 and "" in checkpoints:
        return _leaves_of(checkpoints[""])
    source: dict[str, Any] = {}
    prefix_of: dict[str, str] = {}
    for prefix, checkpoint in checkpoints.items():
        for short, value in _leaves_of(checkpoint).items():
            name = prefixed(prefix, short)
            if name in source:
                diagnostics.problem(
                    "duplicate",
                    name,
                    f"the sources {prefix_of[name]!r} and {prefix!r} both have a leaf of this name",
                    Fix("give one of the sources another name"),
                )
            source[name] = value
            prefix_of[name] = prefix
    return source


def _leaves_of(checkpoint: Checkpoint) -> dict[str, Any]:
    leaves: dict[str, Any] = dict(checkpoint.leaves)
    leaves.update((name, None) for name, empty in checkpoint.empties.items() if empty is None)
    return leaves
