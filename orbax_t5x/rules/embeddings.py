"""Embeddings of Hugging Face's T5 and of T5X's: one for all towers, and one for each.

Hugging Face's files repeat the shared embedding under the towers' names. T5X's dual encoders and decoder-only models
have one below the tower alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from orbax_t5x.rules.leaf_table import SUBLAYERS
from orbax_t5x.rules.steps import equal_copies, target_prefix
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.state import NewState
from orbax_t5x.trees.flat import FlatState

EMBEDDING = "token_embedder/embedding"
SHARED = "shared.weight"
# Hugging Face's name of a tower's embedding, and T5X's.
OF_TOWERS = {f"{tower}.embed_tokens.weight": f"{tower}/{EMBEDDING}" for tower in SUBLAYERS}


@dataclasses.dataclass(frozen=True)
class TowerEmbeddings(Transform):
    """Embeddings for a target that has one per tower: the tower's own of the file, else the shared one.

    For a target with one tower's the file's copies must be equal, since the shared one has no other place.
    """

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        prefix = target_prefix(target, "")
        takers = {
            own: new for own, new in OF_TOWERS.items() if prefix + new in target and (own in state or SHARED in state)
        }
        if not takers:
            return dict(state)
        result = NewState(diagnostics)
        for name, value in state.items():
            if name not in takers and (name != SHARED or prefix + EMBEDDING in target):
                result.put(name, value, name)
        is_compared = len(takers) == 1 and prefix + EMBEDDING not in target
        for own, new in takers.items():
            copies = [name for name in (own, SHARED) if name in state]
            value = state[copies[0]]
            if is_compared and len(copies) > 1:
                value = equal_copies(copies, state, diagnostics, becomes=prefix + new, rule=f"{own!r} -> {new!r}")
            if value is not None:
                result.put(new, value, copies[0], f"{copies[0]!r} -> {new!r}")
        return result.finish()


@dataclasses.dataclass(frozen=True)
class EmbeddingsOfTorch(Transform):
    """Hugging Face's names of T5X's embeddings: those that the target has, else the fewest.

    The only embedding of a model is the shared one. A tower's name gets the tower's own, else that one.
    """

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        defaults = {EMBEDDING: SHARED, **{ours: theirs for theirs, ours in OF_TOWERS.items()}}
        there = [ours for ours in defaults if ours in state]
        if not there:
            return dict(state)
        alone = there[0] if len(there) == 1 else None
        common = EMBEDDING if EMBEDDING in state else alone
        names = {SHARED: common, **{theirs: ours if ours in state else common for theirs, ours in OF_TOWERS.items()}}
        wanted = [theirs for theirs in names if any(f".{name}".endswith(f".{theirs}") for name in target)]
        placed = {theirs: ours for theirs in wanted if (ours := names[theirs]) is not None}
        for ours in there:
            if ours not in placed.values():
                placed.setdefault(SHARED if alone else defaults[ours], ours)
        result = NewState(diagnostics)
        for name, value in state.items():
            if name not in there:
                result.put(name, value, name)
            for theirs in (theirs for theirs, ours in placed.items() if ours == name):
                result.put(theirs, value, name, f"{name!r} -> {theirs!r}")
        return result.finish()
