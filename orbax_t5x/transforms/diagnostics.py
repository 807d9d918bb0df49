"""What a chain of transforms records while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from orbax_t5x.errors import Problem, ProblemKind


@dataclasses.dataclass
class Diagnostics:
    """What a chain of transforms gathers while it runs.

    Attributes:
      problems: everything wrong; a chain with problems must not be executed.
      warnings: what a person should see: shadowed and repeated rules, unused ones where that is allowed.
      dropped: names taken out on purpose.
      rule_for: name -> the rules that produced it, in order, as text.
      fidelity: name -> "exact", "approximate" or "reset", for optimizer leaves that followed their parameter.
      explained: target names whose absence a problem here already explains.
      in_pack: whether a rule pack runs, whose single rules need not match anything.
    """

    problems: list[Problem] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    dropped: list[str] = dataclasses.field(default_factory=list)
    rule_for: dict[str, str] = dataclasses.field(default_factory=dict)
    fidelity: dict[str, str] = dataclasses.field(default_factory=dict)
    explained: set[str] = dataclasses.field(default_factory=set)
    in_pack: bool = False

    def problem(self, kind: ProblemKind, leaf: str | None, message: str, fix: str = "") -> None:
        """Records one problem."""
        self.problems.append(Problem(kind, leaf, message, fix))

    def drop(self, names: Iterable[str]) -> None:
        """Records names that are taken out on purpose; each once."""
        self.dropped.extend(names)

    def credit(self, credits: Mapping[str, tuple[str, str]]) -> None:
        """Records which rule made which name.

        Args:
          credits: new name -> (the name it was made from, the rule as text). What was known of the old name
            comes first.
        """
        before = {old: self.rule_for.get(old) for old, _ in credits.values()}
        for new, (old, text) in credits.items():
            known = before[old]
            self.rule_for[new] = f"{known}; {text}" if known else text
