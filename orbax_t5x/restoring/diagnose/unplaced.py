"""What is said of leaves without a partner: of the target, which are missing, and of the checkpoint, which are left.

Every text says what to do about it. A rule is among that only where one leaf alone can be meant; otherwise the closest
names are listed, for the first few: each look-up scans all names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.restoring.diagnose.other_model import other_models
from orbax_t5x.restoring.diagnose.proposals import assignment
from orbax_t5x.restoring.diagnose.similar import Named, Similar, named
from orbax_t5x.restoring.target_leaf import MissingLeaf
from orbax_t5x.text.wording import leaves_text, listed
from orbax_t5x.transforms.patterns.closest import ClosestNames

# Names shown for a missing leaf, and missing leaves for which they are looked up.
_CLOSEST = 3
_LOOKUPS = 20
# Leftover names shown in the one problem that counts them.
_SHOWN_LEFTOVERS = 5

# An array that stands alone, as a checkpoint or as a target, has an empty name.
_ALONE = "an array alone, which has no name"
_GIVE_VALUES = "give fallback= values, or put ... in the target to leave it out"
# The matrix of a T5 that computes logits, as Hugging Face and T5X name it; and its leaves in an optimizer's state.
_HEAD = re.compile(r"(?:.*/)?(?:lm_head(?:\.weight|/kernel)|decoder/logits_dense/kernel)(?:/\w+)?")
_EMBEDDING = re.compile(r"(?:.*/)?(?:token_embedder/embedding|shared(?:\.weight|/embedding))")


def missing_problems(
    missing: Sequence[MissingLeaf], state: Mapping[str, Any], target: Collection[str], *, takes_rules: bool
) -> list[Problem]:
    """One problem per leaf; leaves that only another model has are one together.

    Args:
      missing: in the target's order.
      state: what there is, by name.
      target: names of the target.
      takes_rules: whether a rule would be applied.
    """
    wanted = [one for one in missing if not one.is_none and not one.is_reset]
    if not wanted:
        return [_problem(one, (), None) for one in missing]
    held = named({name: value for name, value in state.items() if value is not None})
    if not wanted[0].name or [one.name for one in held] == [""]:
        return [_alone(one, held) if one in wanted else _problem(one, (), None) for one in missing]
    explained = other_models([one.name for one in wanted], state, target)
    missing = [one for one in missing if one.name not in explained]
    wanted = [one for one in wanted if one.name not in explained]
    free = {name: value for name, value in state.items() if value is not None and name not in target}
    closest = ClosestNames(list(free) or list(state))
    similar = Similar([_named(one) for one in wanted], named(free)) if takes_rules else None
    looked_up = {one.name for one in wanted[:_LOOKUPS]}
    return [*dict.fromkeys(explained.values())] + [
        _problem(one, closest.to(one.name, _CLOSEST), similar.to(_named(one)) if similar is not None else None)
        if one.name in looked_up
        else _problem(one, (), None)
        for one in missing
    ]


def _problem(missing: MissingLeaf, closest: Sequence[str], same: str | None) -> Problem:
    name = missing.name
    if missing.is_none:
        return Problem(
            "missing",
            name,
            "the checkpoint has None there: that part of the state was not in use when it was saved",
            Fix("put None in the target there, or give fallback= values"),
        )
    if missing.is_reset:
        message = "the optimizer's state of this parameter has no counterpart in the new layout and is reset"
        return Problem("missing", name, message, Fix(_GIVE_VALUES))
    message = "the checkpoint has no such leaf"
    if same is not None:
        fix = f"map it with {assignment(re.escape(name), same)}"
        return Problem("missing", name, f"{message}; {same!r} has its shape and dtype", Fix(fix))
    return Problem(
        "missing", name, message + (f"; closest: {', '.join(closest)}" if closest else ""), Fix(_GIVE_VALUES)
    )


def _alone(missing: MissingLeaf, held: Sequence[Named]) -> Problem:
    """Of a target or a checkpoint that is an array alone, and of names on the other side."""
    what = f"the target is {_ALONE}" if not missing.name else f"the checkpoint is {_ALONE}"
    fix = "name the target's leaf, {name: leaf}" if not missing.name else "pass the target's leaf alone"
    if len(held) == 1 and held[0]._replace(name=missing.name) == _named(missing):
        fix = f"map it with {assignment(re.escape(missing.name), held[0].name)}"
    return Problem("missing", missing.name, f"the checkpoint has no such leaf: {what}", Fix(fix))


def leftover_problems(leftovers: Sequence[str], target: Collection[str], unfilled: Collection[str]) -> list[Problem]:
    """One problem for all, and one of its own for an output projection that the target's model does not have.

    Args:
      leftovers: names of the state dict.
      target: names of the target.
      unfilled: those of them that the state dict does not fill.
    """
    head = [name for name in leftovers if _HEAD.fullmatch(name)]
    if not head or any(_HEAD.fullmatch(name) for name in target):
        return _leftovers(leftovers)
    if not any(_EMBEDDING.fullmatch(name) and name not in unfilled for name in target):
        return _leftovers(leftovers)  # another model, or names that do not meet at all
    return [*_head_problem(head), *_leftovers([name for name in leftovers if name not in head])]


def _head_problem(head: Sequence[str]) -> list[Problem]:
    message = (
        "the checkpoint's model computes logits with a matrix of its own, and the target has none: its model would "
        f"compute them with the embedding, and they would be others ({listed(head, _SHOWN_LEFTOVERS)})"
    )
    fix = (
        "build the model with an output projection (T5X: logits_via_embedding=False, which makes "
        "decoder/logits_dense/kernel)"
    )
    if any(name.endswith("lm_head.weight") for name in head):
        fix += "; or, if config.json has tie_word_embeddings: true, pass that to the rule pack"
    return [Problem("leftover", head[0] if len(head) == 1 else None, message, Fix(fix))]


def _leftovers(names: Sequence[str]) -> list[Problem]:
    if not names:
        return []
    message = f"{leaves_text(len(names))} of the checkpoint without a place in the target: "
    fix = "strict=False leaves them unread; ot.transforms.Drop(pattern) says so in the rules"
    leaf = names[0] if len(names) == 1 else None
    shown = [name or _ALONE for name in names]
    return [Problem("leftover", leaf, message + listed(shown, _SHOWN_LEFTOVERS), Fix(fix))]


def _named(missing: MissingLeaf) -> Named:
    return Named(missing.name, tuple(missing.leaf.shape), str(missing.leaf.dtype))
