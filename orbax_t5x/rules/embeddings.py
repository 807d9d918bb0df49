"""Embeddings of Hugging Face's and T5X's models.

Hugging Face's files repeat the shared embedding under the towers' names. T5X's dual encoders and decoder-only models
have theirs below the tower only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.lazy.cast import AffineFunction
from orbax_t5x.rules.leaf_table import SUBLAYERS
from orbax_t5x.rules.steps import equal_copies, target_prefix
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState, views_of
from orbax_t5x.trees.flat import FlatState

EMBEDDING = "token_embedder/embedding"
SHARED = "shared.weight"
HEAD, HEAD_OF_TORCH = "decoder/logits_dense/kernel", "lm_head.weight"
# Hugging Face's name of a tower's embedding, and T5X's.
OF_TOWERS = {f"{tower}.embed_tokens.weight": f"{tower}/{EMBEDDING}" for tower in SUBLAYERS}


@dataclasses.dataclass(frozen=True)
class TowerEmbeddings(Transform):
    """Fills an embedding per tower: the file's own or the shared embedding.

    For a target with a single tower's embedding the file's copies must be equal: the shared one has no other place.
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
    """Gives embeddings the target's names, else the fewest.

    The only embedding of a model is the shared one. A tower's name gets the tower's own, else that one. Transformers
    ties no tower's embedding of an untied Switch, so that its file has all names.
    """

    is_tied: bool | None

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        defaults = {EMBEDDING: SHARED, **{ours: theirs for theirs, ours in OF_TOWERS.items()}}
        there = [ours for ours in defaults if ours in state]
        if not there:
            return dict(state)
        alone = there[0] if len(there) == 1 else None
        common = EMBEDDING if EMBEDDING in state else alone
        names = {SHARED: common, **{theirs: ours if ours in state else common for theirs, ours in OF_TOWERS.items()}}
        wanted = [theirs for theirs in names if any(f".{name}".endswith(f".{theirs}") for name in target)]
        if not target and HEAD in state and any("/mlp/expert/" in name for name in state):
            wanted = list(names)
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
        head = next((name for name in target if f".{name}".endswith(f".{HEAD_OF_TORCH}")), None)
        if head is not None and common is not None and HEAD not in state:
            self._put_head(common, state, head, result, diagnostics)
        return result.finish()

    def _put_head(
        self, embedding: str, state: FlatState, head: str, result: NewState, diagnostics: Diagnostics
    ) -> None:
        """Puts the projection that a tied T5X model computes with."""
        if self.is_tied is None:
            message = "T5X's model has no logits_dense: its logits are the embedding's, scaled"
            ways = [
                Fix(
                    f"if the target's config.json has tie_word_embeddings: {'true' if tied else 'false'}, use "
                    f"ot.rules.t5x_to_hf_t5(tie_word_embeddings={tied})" + ("" if tied else ", which scales it")
                )
                for tied in (True, False)
            ]
            diagnostics.problem("missing", head, message, Fix.any_of(*ways))
            diagnostics.explained.add(head)
            return
        (view,) = views_of([(embedding, state[embedding])], diagnostics, becomes=head) or (None,)
        if view is not None:
            scale = 1.0 if self.is_tied else view.shape[1] ** -0.5
            rule = "tied: the embedding" if self.is_tied else f"the embedding times {scale:g}"
            made = view if self.is_tied else view.map(AffineFunction(scale, 0.0), f"x * {scale:g}")
            result.put(HEAD_OF_TORCH, made, embedding, rule)
