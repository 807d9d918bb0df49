"""Hypothesis: the target or the checkpoint is a single array, which has no name, and the other side has names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Hypothesis, UnmatchedLeaves, as_template
from orbax_t5x.transforms import AssignmentMap

NO_NAME = "a single array, which has no name"


@dataclasses.dataclass(frozen=True)
class SingleArray(Hypothesis):
    """An array without a container, as the target or as the checkpoint."""

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        if "" not in unmatched.wanted and (not unmatched.wanted or list(unmatched.arrays) != [""]):
            return
        arrays = [(name, tuple(array.shape), str(array.dtype)) for name, array in unmatched.arrays.items()]
        for name, missing in unmatched.wanted.items():
            message = f"the checkpoint has no such leaf: the {'checkpoint' if name else 'target'} is {NO_NAME}"
            fix = Fix.by_target("pass the target's leaf by itself" if name else "name the target's leaf, {name: leaf}")
            if [array[1:] for array in arrays] == [(missing.leaf.shape, str(missing.leaf.dtype))]:
                fix = Fix.adding(AssignmentMap(((re.escape(name), as_template(arrays[0][0])),)))
            yield Explanation(Problem("missing", name, message, fix), (name,))
