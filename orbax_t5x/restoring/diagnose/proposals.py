"""What may make a checkpoint fit a target: the rule pack that leads from the one to the other, or one prefix.

Names and shapes are compared; nothing is read, and nothing is applied to the caller's plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from orbax_t5x.errors import RestorePlanError
from orbax_t5x.restoring.diagnose.similar import SLOT_WORDS
from orbax_t5x.rules import RulePack, infer
from orbax_t5x.rules.layouts import layout_of
from orbax_t5x.transforms import AssignmentMap, FollowOptimizer, Rename, Transform, Translate

_INVERSE = "inverse of "
# What the optimizer keeps, in T5X's and Flax's train states.
_OPTIMIZER = re.compile(r"(?:.*/)?(?:param_states|opt_state)/.*")
# Missing leaves whose likes are looked for, and prefixes tried for each: every one is tried with all missing leaves.
_SAMPLES = 4
_TRIED = 4
# One leaf alone makes no prefix.
_LEAST_ALIKE = 2

Prefixes = tuple[str, str]
"""What names begin with in a checkpoint, and in a target; each is empty or ends with '/'."""


class Proposal(NamedTuple):
    """A transform that was not asked for.

    Attributes:
      transform: to run after what the caller asked for.
      description: Python text of it, with `ot` for this package; several transforms are separated by commas.
      reason: what it is founded on.
    """

    transform: Transform
    description: str
    reason: str = ""


def proposed_pack(source_leaves: Mapping[str, Any], target: Any) -> Proposal | None:
    """The rule pack from a checkpoint's leaves to a target's, as `orbax_t5x.rules.infer` finds it.

    Args:
      source_leaves: leaves by name.
      target: what `infer` takes as a target.

    Returns:
      The pack, or None where there is none, or nothing to map.
    """
    leaves = {name: leaf for name, leaf in source_leaves.items() if leaf is not None}
    try:
        pack = infer(leaves, target)
    except RestorePlanError:
        return None
    if not pack.steps:
        return None
    reason = f"a rule pack leads {pack.found.removesuffix(f': {pack.name}')}"
    if all(isinstance(part, Rename) for part in pack.parts):
        reason = "the checkpoint has them below another prefix"
    return Proposal(pack, pack_text(pack), reason)


def proposed_translation(state: Mapping[str, Any]) -> Proposal | None:
    """`Translate`, for a bundle's own names and a target that is too small a part of a model for `infer`."""
    if layout_of(state).kind != "mesh tf":
        return None
    return Proposal(Translate(), "ot.transforms.Translate()", "the checkpoint's names are Mesh TensorFlow's")


def pack_text(pack: RulePack) -> str:
    """The calls that make a pack, separated by commas."""
    return ", ".join(map(call_text, pack.parts))


def call_text(transform: Any) -> str:
    """The call that makes a transform of this package."""
    if isinstance(transform, FollowOptimizer) and isinstance(transform.transform, Transform):
        return f"ot.transforms.FollowOptimizer({call_text(transform.transform)})"
    if not isinstance(transform, RulePack):
        return f"ot.transforms.{transform!r}"
    if transform.name == "mesh_tf_to_t5x()":
        return "ot.transforms.Translate()"
    is_inverse = transform.name.startswith(_INVERSE)
    return f"ot.rules.{transform.name.removeprefix(_INVERSE)}{'.inverse()' if is_inverse else ''}"


def is_optimizer_leaf(name: str) -> bool:
    """Whether a leaf belongs to an optimizer's state, by its name."""
    return _OPTIMIZER.fullmatch(name) is not None


def assignment(pattern: str, replacement: str) -> str:
    """The call that makes an `AssignmentMap` of one rule."""
    return f"ot.transforms.AssignmentMap([({pattern!r}, {replacement!r})])"


def proposed_prefix(state: Mapping[str, Any], missing: Mapping[str, Any]) -> list[Proposal]:
    """What puts the leaves below one prefix of the checkpoint in place of most of those that are missing.

    Args:
      state: what there is, by name.
      missing: leaves of the target, by name, with a shape.

    Returns:
      The same in two ways, the better one first; empty where no prefix does it, or several do it equally well.
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in state.items() if getattr(leaf, "shape", None) is not None}
    wanted = {name: tuple(leaf.shape) for name, leaf in missing.items()}
    counts = {pair: _filled(pair, shapes, wanted) for pair in _likely_prefixes(shapes, list(wanted))}
    most = max(counts.values(), default=0)
    best = [pair for pair, count in counts.items() if count == most >= _LEAST_ALIKE]
    if len(best) != 1:
        return []
    theirs, ours = best[0]
    reason = f"names begin with {theirs!r} in the checkpoint, and with {ours!r} in the target"
    if not theirs or not ours:
        reason = f"names begin with {theirs or ours!r} in the {'checkpoint' if theirs else 'target'} alone"
    rules = {
        AssignmentMap: (f"{re.escape(ours)}(.*)", f"{_as_template(theirs)}\\1"),
        Rename: (f"{re.escape(theirs)}(.*)", f"{_as_template(ours)}\\1"),
    }
    return [
        Proposal(kind((rule,)), f"ot.transforms.{kind.__name__}([({rule[0]!r}, {rule[1]!r})])", reason)
        for kind, rule in rules.items()
    ]


def _likely_prefixes(shapes: Mapping[str, Any], wanted: list[str]) -> list[Prefixes]:
    """Pairs that would fill one of a few missing leaves, from those that share most parts at the end of the name."""
    by_last: dict[str, list[str]] = {}
    for name in shapes:
        by_last.setdefault(name.rpartition("/")[2], []).append(name)
    found: dict[Prefixes, None] = {}
    for name in wanted[:: max(1, len(wanted) // _SAMPLES)]:
        shared = {other: _shared_end(other, name) for other in by_last.get(name.rpartition("/")[2], ())}
        for other in sorted(shared, key=lambda other: -shared[other])[:_TRIED]:
            pair = other[: -shared[other]], name[: -shared[other]]
            if _is_slot(other) == _is_slot(name) and pair[0] != pair[1]:
                found[pair] = None
    return list(found)


def _is_slot(name: str) -> bool:
    return is_optimizer_leaf(name) or not SLOT_WORDS.isdisjoint(name.split("/"))


def _shared_end(one: str, other: str) -> int:
    """How many characters at the end of two names are the same, in whole parts; the last parts are."""
    length = -1
    for part, same in zip(reversed(one.split("/")), reversed(other.split("/")), strict=False):
        if part != same:
            break
        length += len(part) + 1
    return length


def _filled(pair: Prefixes, shapes: Mapping[str, Any], wanted: Mapping[str, Any]) -> int:
    theirs, ours = pair
    return sum(
        name.startswith(ours) and shapes.get(theirs + name[len(ours) :]) == shape for name, shape in wanted.items()
    )


def _as_template(text: str) -> str:
    return text.replace("\\", "\\\\")
