"""Unmatched leaves, as the hypotheses of `explain` get them, and their answers.

A hypothesis is a function that proposes transforms, which are tried before a user sees them, or explains leaves without
a counterpart in words: a problem in place of each leaf's own, without repeats. Only what the meaning of the names shows
to be right is proposed as data that a program can follow.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from orbax_t5x.errors import Problem
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.targets import MissingLeaf, Target

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class UnmatchedLeaves:
    """Leaves of either side without a counterpart.

    Attributes:
      stored: the leaves that the transforms made, by name.
      target: what is to be filled.
      unfilled: names of the target for which there is no leaf of their shape, in the target's order.
      missing: leaves of the target that nothing fills and nothing explains yet, in the target's order.
      leftovers: names of stored leaves without a place that nothing explains yet; none where they are allowed.
      transforms: of the call, or what `"auto"` found.
      takes_rules: whether one more transform would be applied; not so where a run is resumed.
      source: the leaves before the transforms, by name.
      items: names of the items of the checkpoint, if it was opened with all of several, or with its only one.
      clashes: the problem of each target leaf whose value has another shape, which nothing explains yet.
      options: of the call.
    """

    stored: Mapping[str, Any]
    target: Target
    unfilled: Sequence[str]
    missing: tuple[MissingLeaf, ...]
    leftovers: tuple[str, ...] = ()
    transforms: Sequence[Callable[..., Any]] = ()
    takes_rules: bool = True
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    clashes: Mapping[str, Problem] = dataclasses.field(default_factory=dict[str, Problem])
    items: tuple[str, ...] = ()
    options: RestoreOptions = dataclasses.field(default_factory=RestoreOptions)

    @functools.cached_property
    def arrays(self) -> dict[str, Any]:
        """Stored leaves with shape and dtype."""
        return {
            name: value for name, value in self.stored.items() if hasattr(value, "shape") and hasattr(value, "dtype")
        }

    @functools.cached_property
    def free(self) -> dict[str, Any]:
        """Arrays that fill no leaf of the target."""
        taken = self.target.leaves.keys() - set(self.unfilled)
        return {name: value for name, value in self.arrays.items() if name not in taken}

    @functools.cached_property
    def may_be_stored(self) -> bool:
        """True if an array without a place may be an unfilled one, or a number an unfilled number."""
        free = {math.prod(value.shape) > 1 for name, value in self.free.items() if name not in self.target.leaves}
        return not free.isdisjoint({math.prod(shape) > 1 for shape in self.unfilled_shapes.values()})

    @functools.cached_property
    def unfilled_shapes(self) -> Shapes:
        """Shapes that the target has under the names of `unfilled`."""
        leaves = self.target.leaves  # empty for a target of None
        return {name: leaves[name].shape for name in self.unfilled if name in leaves}

    @functools.cached_property
    def wanted(self) -> dict[str, MissingLeaf]:
        """The missing leaves that the checkpoint may hold under another name."""
        return {leaf.name: leaf for leaf in self.missing if not leaf.is_none and not leaf.is_reset}

    @functools.cached_property
    def may_fill_unasked(self) -> bool:
        """True if the fallback fills leaves that may be stored under other names."""
        is_filled = self.options.fallback is not None and self.options.fallback_for is None
        return is_filled and self.may_be_stored

    def without(self, names: Collection[str]) -> UnmatchedLeaves:
        """Returns the unmatched leaves without leaves that are explained."""
        return dataclasses.replace(
            self,
            missing=tuple([leaf for leaf in self.missing if leaf.name not in names]),
            leftovers=tuple([name for name in self.leftovers if name not in names]),
            clashes={name: problem for name, problem in self.clashes.items() if name not in names},
        )


class Remedy(NamedTuple):
    """Transforms that may fill most missing leaves, with a `reason`.

    `advice` is the fix in words, where the names do not show that the transforms are right; `{}` in it is for `"auto"`.
    With `is_first` they run before those of the call, with `is_instead` these do not run. `item` is what has the same
    effect as the transforms.
    """

    transforms: tuple[Any, ...]
    reason: str
    advice: str | None = None
    is_first: bool = False
    is_instead: bool = False
    item: str = ""


class Explanation(NamedTuple):
    """A problem, and the names of the leaves that it explains."""

    problem: Problem
    names: Collection[str]


def as_template(text: str) -> str:
    """Escapes text for the replacement of a rule."""
    return text.replace("\\", "\\\\")
