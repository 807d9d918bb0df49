"""Hypothesis: the target's model has more layers than the checkpoint's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Hypothesis, UnmatchedLeaves
from orbax_t5x.text.wording import counted

_LAYER = re.compile(r"(?P<tower>(?:.*?/)?)(?P<word>layers?|blocks?|h)[_/](?P<number>\d+)/.*")
_FIX = Fix.any_of(
    Fix.by_target("build the model with as many layers"), Fix.setting("give {} values for the others", fallback=...)
)


@dataclasses.dataclass(frozen=True)
class OtherDepth(Hypothesis):
    """Numbered layers of which the checkpoint has the first ones only."""

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        depths, wanted = _depths(unmatched.stored), _depths(unmatched.target.leaves)
        for name in unmatched.wanted:
            layer = _LAYER.fullmatch(name)
            key = (layer["tower"], layer["word"]) if layer is not None else ("", "")
            if layer is None or not 0 < depths.get(key, 0) <= int(layer["number"]):
                continue
            tower = key[0].rstrip("/").rpartition("/")[2]
            theirs, ours = (f"checkpoint's {tower}", f"target's {tower}") if tower else ("checkpoint", "target")
            message = f"the {theirs} has {counted(depths[key], 'layer')}, the {ours} {wanted[key]}"
            yield Explanation(Problem("missing", None, message, _FIX), (name,))


def _depths(names: Iterable[str]) -> dict[tuple[str, str], int]:
    """Returns the number of layers by tower and by the word in the layers' names."""
    depths: dict[tuple[str, str], int] = {}
    for match in filter(None, map(_LAYER.fullmatch, names)):
        key = match["tower"], match["word"]
        depths[key] = max(depths.get(key, 0), int(match["number"]) + 1)
    return depths
