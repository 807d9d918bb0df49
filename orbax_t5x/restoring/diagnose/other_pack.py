"""Hypothesis: the names are another layout's, and a rule pack or `Translate` leads from the one to the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.restoring.chains import OneSource
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Hypothesis, Remedy, UnmatchedLeaves
from orbax_t5x.rules import infer, mesh_tf_to_t5x
from orbax_t5x.rules.finding import find_rules
from orbax_t5x.rules.graph import pack_to_t5x
from orbax_t5x.rules.layouts import find_layout
from orbax_t5x.text.wording import counted
from orbax_t5x.transforms import Drop, FollowOptimizer, Rename, Transform, Translate

_MESH_TF = "the checkpoint's names are Mesh TensorFlow's"


@dataclasses.dataclass(frozen=True)
class OtherPack(Hypothesis):
    """A pack that `orbax_t5x.rules.infer` finds; `Translate` for a target too small a part of a model for that."""

    def remedies(self, unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
        remedy = pack_remedy(unmatched.stored, unmatched.target.original)
        if remedy is not None:
            yield remedy
        elif _is_untranslated(unmatched):
            yield Remedy((Translate(),), _MESH_TF)
        # The rules of the call may be written for the names that a pack makes.
        if unmatched.transforms and all(map(_is_rule, unmatched.transforms)):
            first = pack_remedy(unmatched.source, unmatched.target.original)
            if first is not None:
                yield first._replace(is_first=True)

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        # A target that has the bundle's names for its other leaves is not to be translated.
        is_mostly_unfilled = 2 * len(unmatched.unfilled) > len(unmatched.target.leaves)
        if is_mostly_unfilled and unmatched.missing and unmatched.takes_rules and _is_untranslated(unmatched):
            message = (
                f"{counted(len(unmatched.missing), 'target leaf is', 'target leaves are')} missing, and {_MESH_TF}"
            )
            yield Explanation(Problem("missing", None, message, Fix.adding(Translate())), ())


def _is_rule(transform: Any) -> bool:
    return isinstance(transform, Transform) and not isinstance(transform, OneSource)


def pack_remedy(stored: Mapping[str, Any], target: Mapping[str, Any]) -> Remedy | None:
    """Returns the pack that leads from the names of stored leaves to those of a target, or None."""
    try:
        pack = infer(stored, target)
    except RestorePlanError:
        return _aligned_pack(stored, target)
    if not pack.steps:
        return None
    reason = f"a rule pack leads {pack.found.removesuffix(f': {pack.name}')}"
    if all(map(_is_prefix_rule, pack.parts)):
        reason = "the checkpoint has them below another prefix"
    return Remedy(_with_translate(pack.parts), reason)


def _is_prefix_rule(part: Transform) -> bool:
    moved = part.transform if isinstance(part, FollowOptimizer) else part
    return isinstance(moved, (Rename, Drop))


def _with_translate(parts: tuple[Transform, ...]) -> tuple[Transform, ...]:
    """Returns the parts with the pack for Mesh TensorFlow's names under its other name."""
    return tuple([Translate() if part == mesh_tf_to_t5x() else part for part in parts])


def _aligned_pack(stored: Mapping[str, Any], target: Mapping[str, Any]) -> Remedy | None:
    """Returns a pack from known names and what aligns its result with a target that calls the same model otherwise."""
    kind = find_layout(stored).kind
    if pack_to_t5x(kind) is None:
        return None
    try:
        found = find_rules(stored, target)
    except RestorePlanError:
        return None
    others = [part for part in found.parts if part != mesh_tf_to_t5x() and not isinstance(part, Drop)]
    if kind == "mesh tf" and not (found.is_whole and others and mesh_tf_to_t5x() in found.parts):
        return None  # `Translate` by itself leads from those names to a part of a model, too
    return Remedy(
        _with_translate(found.parts), "a rule pack leads to a model that has other words for some parts of the names"
    )


def _is_untranslated(unmatched: UnmatchedLeaves) -> bool:
    has_translate = any(isinstance(transform, Translate) for transform in unmatched.transforms)
    return not has_translate and find_layout(unmatched.stored).kind == "mesh tf"
