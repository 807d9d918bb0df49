"""Findings of a chain of transforms, and states under new names.

Two leaves that land on one name are a problem, never the loss of one of them.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from orbax_t5x.errors import Fix, Problem, ProblemKind, RestorePlanError
from orbax_t5x.lazy import View, as_view
from orbax_t5x.trees.flat import FlatState


class Application(NamedTuple):
    """Application of a transform, with its chain's findings."""

    transform: object
    state: FlatState
    target: FlatState
    result: FlatState
    before: Diagnostics
    after: Diagnostics

    def is_of(self, transform: object, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> bool:
        """Tests that the same transform gets the same objects."""
        return (
            _is_same(self.state, state)
            and _is_same(self.target, target)
            and (self.before.settings(), self.before.origins()) == (diagnostics.settings(), diagnostics.origins())
            and self.transform == transform
        )

    def repeat(self, diagnostics: Diagnostics) -> dict[str, Any]:
        """Records the findings again, and returns the result."""
        diagnostics.warnings.extend(self.after.warnings[len(self.before.warnings) :])
        diagnostics.explained.update(self.after.explained)
        for found, made in zip(diagnostics.origins(), self.after.origins(), strict=True):
            found.update(made)
        return dict(self.result)


def _is_same(one: FlatState, other: FlatState) -> bool:
    return list(one) == list(other) and all(map(operator.is_, one.values(), other.values()))


Applied: TypeAlias = list[Application] | None


class Why(NamedTuple):
    """Reason for the leaf that a target's leaf gets.

    Attributes:
      kind: "given"; its "name"; its name after a "renaming"; "structure"; a rule "pack"; "optimizer" for moments that
        follow their parameter, steps and counts.
      detail: the packs, or the fidelity of a moment.
    """

    kind: Literal["given", "name", "renaming", "structure", "pack", "optimizer"]
    detail: str = ""


@dataclasses.dataclass
class Diagnostics:
    """Findings of a chain of transforms, and origins of leaves.

    Findings, for the user:
      problems: everything wrong; a chain with problems must not be executed.
      warnings: shadowed and repeated rules, unused ones where that is allowed, values that were rounded or reset.

    Where leaves come from, for a plan:
      rule_for: name -> the rules that produced it, in order, as text.
      origin_of: name -> the name of the (first) leaf that it was made from, in the state that the chain began with;
        none for leaves that have the name that they had.
      fidelity: name -> "exact", "approximate" or "reset", for optimizer leaves that followed their parameter.

    About an optimizer's leaves:
      lost: names that slots would have had that cannot follow their parameters, and why.
      unplaced: leaves of the checkpoint that have no place in the target's optimizer, although it has their names.
      slots: names of the slots that follow while a transform runs; its patterns may match them.

    For the traceback:
      raised: what a caller's functions raised, in order; the first becomes the cause of the error.

    For the check that the target is complete:
      explained: names of leaves whose absence a problem here already explains.

    Settings:
      warns_of_unused: whether a rule that matches nothing, and need not, is a warning; not so inside a rule pack.
      allows_unmapped: whether a rule pack may leave leaves of the model as they are; else each is a problem.
      new_leaves: names of the target's leaves that a caller has said to be new.
      follows: whether the optimizer follows transforms without being asked; not so inside a rule pack.
      applied: earlier applications of rule packs, which are not made again, and where new ones are added; or None.
    """

    problems: list[Problem] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    rule_for: dict[str, str] = dataclasses.field(default_factory=dict)
    origin_of: dict[str, str] = dataclasses.field(default_factory=dict)
    fidelity: dict[str, str] = dataclasses.field(default_factory=dict)
    explained: set[str] = dataclasses.field(default_factory=set)
    warns_of_unused: bool = True
    allows_unmapped: bool = False
    raised: list[Exception] = dataclasses.field(default_factory=list)
    lost: dict[str, str] = dataclasses.field(default_factory=dict)
    unplaced: dict[str, Any] = dataclasses.field(default_factory=dict)
    slots: Collection[str] = ()
    new_leaves: Collection[str] = ()
    follows: bool = True
    applied: Applied = dataclasses.field(default=None, repr=False, compare=False)

    def settings(self) -> Diagnostics:
        """Returns diagnostics without findings, with the same settings."""
        return Diagnostics(
            warns_of_unused=self.warns_of_unused,
            allows_unmapped=self.allows_unmapped,
            new_leaves=self.new_leaves,
            follows=self.follows,
            applied=self.applied,
        )

    def origins(self) -> tuple[dict[str, str], ...]:
        """Returns the rules, origins and fidelity of leaves, and slots that cannot follow."""
        return self.rule_for, self.origin_of, self.fidelity, self.lost

    def copy(self) -> Diagnostics:
        """Copies the findings, for two runs from here."""
        return Diagnostics(*(copy.copy(getattr(self, field.name)) for field in dataclasses.fields(self)))

    def error(self, problems: Sequence[Problem] | None = None, *, path: str | None = None) -> RestorePlanError:
        """Returns the error to raise, with its cause.

        Args:
          problems: those found here, and more; None: those found here.
          path: of the checkpoint.
        """
        error = RestorePlanError(self.problems if problems is None else problems, path=path)
        if self.raised:
            error.__cause__ = self.raised[0]
        return error

    def problem(
        self, kind: ProblemKind, leaf: str | None, message: str, fix: Fix | None = None, *, becomes: str | None = None
    ) -> None:
        """Records a problem.

        Args:
          kind: see `ProblemKind`.
          leaf: the name of the leaf that it is about.
          message: what is wrong.
          fix: what to do.
          becomes: the name of the leaf that is not made because of it, where that is another.
        """
        self.problems.append(Problem(kind, leaf, message, fix))
        self.explained.update(name for name in (leaf, becomes) if name is not None)

    def record_origins(self, origins: Mapping[str, tuple[str, str]]) -> None:
        """Records the rules that made leaves.

        Args:
          origins: new name -> (the name it was made from, the rule as text). Rules that made the old name come
            before it.
        """
        before = {old: self.rule_for.get(old) for old, _ in origins.values()}
        self.fidelity.update(
            {new: fidelity for new, (old, _) in origins.items() if (fidelity := self.fidelity.get(old)) is not None}
        )
        self.origin_of.update({new: self.origin_of.get(old, old) for new, (old, _) in origins.items()})
        for new, (old, rule) in origins.items():
            earlier = before[old]
            self.rule_for[new] = f"{earlier}; {rule}" if earlier else rule


class NewState:
    """Collector of results under new names in `flat`; records clashes."""

    def __init__(self, diagnostics: Diagnostics):
        self.flat: dict[str, Any] = {}
        self._diagnostics = diagnostics
        self._made_from: dict[str, str] = {}
        self._origins: dict[str, tuple[str, str]] = {}

    def put(self, name: str, value: Any, made_from: str, rule: str | None = None) -> None:
        """Adds a leaf, made from an old leaf by a rule."""
        if name in self.flat:
            message = f"{self._made_from[name]!r} and {made_from!r} both become {name!r}" + (
                f" ({rule})" if rule else ""
            )
            self._diagnostics.problem("duplicate", name, message, Fix("rename or drop one of the two"))
            return
        self.flat[name] = value
        self._made_from[name] = made_from
        if rule is not None:
            self._origins[name] = (made_from, rule)

    def finish(self) -> dict[str, Any]:
        """Returns the state dict and records its origins."""
        self._diagnostics.record_origins(self._origins)
        return self.flat


def view_of(name: str, value: Any, diagnostics: Diagnostics, *, becomes: str | None = None) -> View | None:
    """Returns a leaf as a view, or records a problem."""
    try:
        return as_view(value, name=name)
    except (TypeError, ValueError) as error:
        fix = Fix("leave it out of the pattern")
        diagnostics.problem("transform", name, f"not an array: {error}", fix, becomes=becomes)
        return None


def views_of(leaves: Iterable[tuple[str, Any]], diagnostics: Diagnostics, *, becomes: str) -> list[View] | None:
    """Returns leaves as views, or None after a problem."""
    views = [view_of(name, value, diagnostics, becomes=becomes) for name, value in leaves]
    arrays = [view for view in views if view is not None]
    return arrays if len(arrays) == len(views) else None


def combine_leaves(
    leaves: Iterable[tuple[str, Any]],
    combine: Callable[[list[View]], View | None],
    diagnostics: Diagnostics,
    *,
    becomes: str,
    rule: str,
    advice: str | None = None,
) -> View | None:
    """Combines leaves into a view; records a problem on failure."""
    views = views_of(leaves, diagnostics, becomes=becomes)
    if views is None:
        return None
    try:
        return combine(views)
    except (ValueError, TypeError) as error:
        kind = "shape" if isinstance(error, ValueError) else "dtype"
        diagnostics.problem(kind, becomes, f"{rule}: {error}", None if advice is None else Fix(advice))
        return None
