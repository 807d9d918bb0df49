"""What would make a checkpoint fit a target: the rule pack that leads from the one to the other.

Names and shapes are compared; nothing is read, and nothing is applied to the caller's plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from orbax_t5x.errors import RestorePlanError
from orbax_t5x.rules import RulePack, infer
from orbax_t5x.transforms import Transform

_INVERSE = "inverse of "
_THEN = " then "


class Proposal(NamedTuple):
    """A transform that was not asked for.

    Attributes:
      transform: to run after what the caller asked for.
      description: Python text of it, with `ot` for this package; several transforms are separated by commas.
    """

    transform: Transform
    description: str


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
    return Proposal(pack, pack_text(pack)) if pack.steps else None


def pack_text(pack: RulePack) -> str:
    """The calls that make a pack, separated by commas."""
    is_inverse = pack.name.startswith(_INVERSE)
    names = pack.name.removeprefix(_INVERSE).split(_THEN)
    if is_inverse:
        return ", ".join(f"ot.rules.{name}.inverse()" for name in reversed(names))
    return ", ".join(
        "ot.transforms.Translate()" if name == "mesh_tf_to_t5x()" else f"ot.rules.{name}" for name in names
    )
