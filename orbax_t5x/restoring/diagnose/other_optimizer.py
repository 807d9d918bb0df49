"""Hypothesis: the target's optimizer is another, or is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.optim.moments import find_optimizer
from orbax_t5x.optim.optimizer_names import is_in_optimizer
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, UnmatchedLeaves
from orbax_t5x.restoring.diagnose.unexplained import fill_new
from orbax_t5x.text.wording import leaves_text
from orbax_t5x.transforms import AdafactorSlots
from orbax_t5x.trees.subtrees import exact_patterns

# A single leaf is no optimizer.
_LEAST = 2
# By the kinds of moments, the first that fits.
_OPTIMIZERS = (
    ({"v_row", "v_col"}, "Adafactor's"),
    ({"mu", "nu"}, "Adam's"),
    ({"trace"}, "SGD's with momentum"),
    ({"mu"}, "Lion's"),
)
_AS_STORED = Fix.by_target("give the target the checkpoint's optimizer")
_CONVERT_BUNDLE = Fix("put ot.transforms.AdafactorSlots() behind ot.rules.mesh_tf_to_t5x()")
_CONVERT = Fix("begin the transforms with ot.transforms.AdafactorSlots(), before parameters are renamed")


def other_optimizer(unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
    """Explains a target without its optimizer's state in the checkpoint."""
    wanted, ours = _optimizer(unmatched.target.leaves)
    missing = [name for name in unmatched.wanted if name in wanted]
    if len(missing) < _LEAST or not wanted <= set(unmatched.unfilled):
        return
    stored, theirs = _optimizer({name: value for name, value in unmatched.source.items() if value is not None})
    anew = fill_new(exact_patterns(missing, list(unmatched.target.leaves)), unmatched, "to start the optimizer anew")
    ways = [_AS_STORED, anew.in_words()]
    message = f"the checkpoint has {theirs} state, the target {ours}"
    if not stored:
        message = "the checkpoint has no optimizer's state"
        ways = [anew.in_words() if unmatched.may_be_stored else anew]
    elif theirs == ours:
        message = f"the checkpoint has {theirs} state under other names or in other shapes than the target"
        is_converted = any(isinstance(transform, AdafactorSlots) for transform in unmatched.transforms)
        if theirs == "Adafactor's" and not is_converted:
            ways.insert(0, _CONVERT_BUNDLE if any("_slot_" in name for name in stored) else _CONVERT)
    message += f": {leaves_text(len(missing))} of the target's optimizer are missing"
    yield Explanation(Problem("missing", None, message, Fix.any_of(*ways)), missing)


def _optimizer(leaves: Mapping[str, Any]) -> tuple[set[str], str]:
    """Returns an optimizer's leaves, and its owner."""
    optimizer = find_optimizer(leaves)
    names = {name for name in leaves if optimizer.has(name) or is_in_optimizer(name)}
    # Slots of parameters that a target lacks are known by their words only.
    words = {moments.kind for moments in optimizer.moments if not moments.is_copy}
    words = words or {word for name in names for word in name.split("/")}
    return names, next((name for kinds, name in _OPTIMIZERS if kinds <= words), "an optimizer's")
