"""Problem of a restore, as data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from orbax_t5x.text.fix import Fix
from orbax_t5x.text.wording import with_full_stop

ProblemKind = Literal[
    "missing",
    "leftover",
    "shape",
    "dtype",
    "sharding",
    "target",
    "fallback",
    "duplicate",
    "name",
    "rule",
    "unused_rule",
    "unmapped",
    "transform",
    "translate",
    "optimizer",
    "provenance",
    "nothing_restored",
]
"""Kind of a `Problem`. The words are stable, and programs may compare them:

* "missing": a leaf of the target, or an input of a transform, is in no checkpoint.
* "leftover": a leaf of the checkpoint has no place in the target, and `strict` is set.
* "shape": two shapes disagree, or a transform does not apply to a shape.
* "dtype": a conversion that may lose values, or that needs `Cast`, and was not requested.
* "sharding": a sharding does not fit its leaf, or is needed and missing.
* "target": the target holds something that no leaf can be restored into.
* "fallback": the fallback cannot be used for a leaf.
* "duplicate": two leaves have one name.
* "name": a checkpoint could not be opened with a name that is to be saved.
* "rule": a rule cannot be applied as it is written.
* "unused_rule": a rule that must match matches nothing.
* "unmapped": a rule pack does not know the name of a leaf of the model, and `strict` is set.
* "transform": a transform raised an exception or returned something that is no state dict.
* "translate": a name of Mesh TensorFlow has no translation into T5X's.
* "optimizer": two optimizers keep states that cannot be converted exactly.
* "provenance": what was applied to this state before disagrees with what is to be applied now.
* "nothing_restored": no leaf of the checkpoint has a place in the target, and the fallback would fill it alone.
"""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Problem of a restore, found before anything is read.

    Attributes:
      kind: a stable short word for programs; see `ProblemKind`.
      leaf: the '/'-joined name concerned, or None where the problem is not about one leaf.
      message: what is wrong, with both values.
      fix: what to do about it, or None.
      source: the end of `message` that names the stored leaves; problems that differ only there are shown as one.

    Example:
      >>> try:
      ...     ot.restore(bundle, {"shared": {"embedding": np.zeros((8, 8), np.float32)}}, strict=False)
      ... except ot.RestorePlanError as error:
      ...     [(problem.kind, problem.leaf) for problem in error.problems]
      [('shape', 'shared/embedding')]
    """

    kind: ProblemKind
    leaf: str | None
    message: str
    fix: Fix | None = None
    source: str = dataclasses.field(default="", repr=False)

    def as_data(self, fix_text: Callable[[Fix], str] = str) -> dict[str, Any]:
        """Returns the problem for JSON; transforms are the code that makes them.

        Args:
          fix_text: gives the text of the fix.
        """
        fix = None if self.fix is None else {**self.fix.as_data(), "text": fix_text(self.fix)}
        return {"kind": self.kind, "leaf": self.leaf, "message": self.message, "fix": fix}

    def __str__(self) -> str:
        where = "" if self.leaf is None else f"{self.leaf}: "
        return f"[{self.kind}] {with_full_stop(where + self.message)}" + (
            "" if self.fix is None else f"\nFix: {self.fix}"
        )
