"""Hypothesis: leftover leaves are the scales of quantized weights, which are other numbers without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Hypothesis, UnmatchedLeaves
from orbax_t5x.rules import scaled_fp8_to_float32
from orbax_t5x.text.wording import counted
from orbax_t5x.transforms.dequantize import MARKER, scales_beside


@dataclasses.dataclass(frozen=True)
class UnreadScales(Hypothesis):
    """`X.scale_weight` is left over, and the target takes `X.weight`."""

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        scales = scales_beside(unmatched.stored.keys(), unmatched.leftovers)
        if scales and unmatched.takes_rules:
            count = counted(len(scales), "weight is quantized and has a scale", "weights are quantized and have scales")
            message = f"{count} beside them that the target does not take ({scales[0]}), without which they are wrong"
            markers = [name for name in unmatched.leftovers if name.rpartition(".")[2] == MARKER]
            fix = Fix.adding(scaled_fp8_to_float32())
            yield Explanation(Problem("leftover", None, message, fix), (*scales, *markers))


def scales_warning(read: Collection[str], unread: Iterable[str]) -> list[str]:
    """Returns the warning about weights that a plan reads without the scales beside them, if there are any."""
    scales = scales_beside(read, unread)
    if not scales:
        return []
    count = counted(len(scales), "quantized weight is", "quantized weights are")
    return [
        f"{count} restored without the scale that is stored beside it ({scales[0]}): add "
        "ot.rules.scaled_fp8_to_float32() to the transforms"
    ]
