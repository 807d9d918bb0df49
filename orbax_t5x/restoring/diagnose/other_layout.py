"""Hypotheses on rules: missing, other, needless, or unfollowed by the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orbax_t5x import on_demand, transforms
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.optim.optimizer_names import is_in_optimizer
from orbax_t5x.restoring.diagnose.hypothesis import Remedy, UnmatchedLeaves
from orbax_t5x.restoring.sources import OneSource
from orbax_t5x.transforms import Transform

_MESH_TF = "the checkpoint's names are Mesh TensorFlow's"
# Leaves of a model that is aligned; fewer are explained one by one.
_LEAST_ALIGNED = 8
_LET_AUTO_FIND = "if the two are one model, pass {}"
_find_layout = on_demand.function("orbax_t5x.rules.layouts", "find_layout")
_find_rules = on_demand.function("orbax_t5x.rules.finding", "find_rules")
_find_pack = on_demand.function("orbax_t5x.rules.inference", "find_pack")
_pack_function = on_demand.function("orbax_t5x.rules.graph", "pack_function")


def needless_rules(unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
    """Proposes no transforms, if they take away the target's names."""
    if unmatched.transforms and any(name in unmatched.source for name in unmatched.unfilled):
        yield Remedy(
            (), "the target has the names of the checkpoint as they are without the transforms", is_instead=True
        )


def unfollowed_rules(unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
    """Proposes that the optimizer follows rules that renamed its parameters."""
    chain = list(unmatched.transforms)
    if not any(map(is_in_optimizer, unmatched.unfilled)) or any(isinstance(rule, OneSource) for rule in chain):
        return
    followed = [transforms.FollowOptimizer(rule) if _may_follow(rule) else rule for rule in chain]
    if followed != chain:
        reason = "the rules of the call name parameters, and the optimizer's leaves do not follow them"
        yield Remedy(tuple(followed), reason, is_instead=True)


def _may_follow(rule: Any) -> bool:
    return not getattr(rule, "follow", False) and not isinstance(rule, OneSource | transforms.Keep | transforms.Cast)


def other_pack(unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
    """Proposes a pack that `orbax_t5x.rules.infer` finds.

    It is `Translate` for a target too small a part of a model for that.
    """
    remedy = pack_remedy(unmatched.stored, unmatched.target.original)
    if remedy is not None:
        yield remedy
    elif _is_untranslated(unmatched):
        yield Remedy((transforms.Translate(),), _MESH_TF)
    # The rules of the call may be written for the names that a pack makes, or be those of another layout.
    if unmatched.transforms and all(map(_is_rule, unmatched.transforms)):
        first = pack_remedy(unmatched.source, unmatched.target.original)
        if first is not None:
            yield first._replace(is_first=True)
            yield first._replace(is_instead=True, reason=f"{first.reason}, without the transforms of the call")


def _is_rule(transform: Any) -> bool:
    return isinstance(transform, Transform) and not isinstance(transform, OneSource)


def pack_remedy(stored: Mapping[str, Any], target: Mapping[str, Any]) -> Remedy | None:
    """Finds the pack from stored leaves to a target, or None."""
    pack = _find_pack(stored, target)
    if pack is None or not pack.steps:
        return None
    reason = f"a rule pack leads {pack.found.removesuffix(f': {pack.name}')}"
    if all(map(_is_prefix_rule, pack.parts)):
        reason = "the checkpoint has them below another prefix"
    return Remedy(_with_translate(pack.parts), reason)


def _is_prefix_rule(part: Transform) -> bool:
    return isinstance(part, (transforms.Rename, transforms.Drop))


def _with_translate(parts: tuple[Transform, ...]) -> tuple[Transform, ...]:
    """Returns the parts with `Translate` in the pack's place."""
    return tuple([transforms.Translate() if _is_translation(part) else part for part in parts])


def _is_translation(part: Transform) -> bool:
    return part == _pack_function("mesh_tf_to_t5x")()


def _is_untranslated(unmatched: UnmatchedLeaves) -> bool:
    has_translate = any(isinstance(transform, transforms.Translate) for transform in unmatched.transforms)
    return not has_translate and _find_layout(unmatched.stored).kind == "mesh tf"


def aligned_model(unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
    """Proposes the rules of `"auto"` for the whole model, as advice.

    Names alone do not show that they are right.
    """
    if unmatched.transforms or len(unmatched.missing) < _LEAST_ALIGNED:
        return
    try:
        found = _find_rules(unmatched.arrays, unmatched.target.original)
    except RestorePlanError:
        return
    if found.is_whole:
        reason = "the names differ, and shapes, structure and words give each one reading"
        yield Remedy(found.parts, reason, _LET_AUTO_FIND)
