"""Hypothesis: the target's optimizer is another one than the checkpoint's, or the checkpoint has none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Hypothesis, UnmatchedLeaves, is_in_optimizer_state
from orbax_t5x.restoring.diagnose.unexplained import give_values
from orbax_t5x.text.wording import leaves_text
from orbax_t5x.transforms import AdafactorSlots

# A single leaf is no optimizer.
_LEAST = 2
# By the words in the names of what an optimizer keeps, the first that fits.
_OPTIMIZERS = (
    ({"v_row", "v_col"}, "Adafactor's"),
    ({"mu", "nu"}, "Adam's"),
    ({"trace"}, "SGD's with momentum"),
    ({"mu"}, "Lion's"),
)
_ANEW = Fix.setting("give {} values, which start the optimizer anew", fallback=...)
_CONVERT = Fix("begin the transforms with ot.transforms.AdafactorSlots(), before parameters are renamed")


@dataclasses.dataclass(frozen=True)
class OtherOptimizer(Hypothesis):
    """A target that has nothing of its optimizer's state from the checkpoint."""

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        missing = [name for name in unmatched.wanted if is_in_optimizer_state(name)]
        wanted = [name for name in unmatched.target.leaves if is_in_optimizer_state(name)]
        if len(missing) < _LEAST or not set(wanted) <= set(unmatched.unfilled):
            return
        stored = [name for name, value in unmatched.source.items() if value is not None and is_in_optimizer_state(name)]
        theirs, ours = _optimizer(stored), _optimizer(wanted)
        first = unmatched.wanted[missing[0]]
        ways = [give_values(first) if first.is_barred else _ANEW]
        message = f"the checkpoint has {theirs} state, the target {ours}"
        if not stored:
            message = "the checkpoint has no optimizer's state"
        elif theirs == ours:
            message = f"the checkpoint has {theirs} state under other names or in other shapes than the target"
            is_converted = any(isinstance(transform, AdafactorSlots) for transform in unmatched.transforms)
            if theirs == "Adafactor's" and not is_converted:
                ways.insert(0, _CONVERT)
        message += f": {leaves_text(len(missing))} of the target's optimizer are missing"
        yield Explanation(Problem("missing", None, message, Fix.any_of(*ways)), missing)


def _optimizer(names: Iterable[str]) -> str:
    """Returns the name of the optimizer that keeps leaves of these names, as an owner."""
    words = {word for name in names for word in name.split("/")}
    return next((name for kinds, name in _OPTIMIZERS if kinds <= words), "an optimizer's")
