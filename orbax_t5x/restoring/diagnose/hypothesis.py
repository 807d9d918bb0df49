"""Unmatched leaves, as the hypotheses of `explain` get them, and their answers.

A hypothesis is a function that proposes transforms, which are tried before a user sees them, or explains leaves without
a counterpart in words: a problem in place of each leaf's own, without repeats. Only what the meaning of the names shows
to be right is proposed as code that can be pasted.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from orbax_t5x.errors import Problem
from orbax_t5x.optim.optimizer_names import is_in_optimizer
from orbax_t5x.restoring.targets import MissingLeaf, Target
from orbax_t5x.transforms import Transform

Shapes = Mapping[str, tuple[int, ...]]

_NUMBER = re.compile(r"\d[/.]")


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
      bare_sources: of several sources those without transforms of their own: their leaves by their own names.
      source: the leaves before the transforms, by name.
      sources: names of several sources, with which the names of their leaves begin.
      clashes: the problem of each target leaf whose value has another shape, which nothing explains yet.
    """

    stored: Mapping[str, Any]
    target: Target
    unfilled: Sequence[str]
    missing: tuple[MissingLeaf, ...]
    leftovers: tuple[str, ...] = ()
    transforms: Sequence[Callable[..., Any]] = ()
    takes_rules: bool = True
    bare_sources: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict[str, Mapping[str, Any]])
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    clashes: Mapping[str, Problem] = dataclasses.field(default_factory=dict[str, Problem])
    sources: tuple[str, ...] = ()

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
    def unfilled_shapes(self) -> Shapes:
        """Shapes that the target has under the names of `unfilled`."""
        leaves = self.target.leaves  # empty for a target of None
        return {name: leaves[name].shape for name in self.unfilled if name in leaves}

    @functools.cached_property
    def wanted(self) -> dict[str, MissingLeaf]:
        """The missing leaves that the checkpoint may hold under another name."""
        return {one.name: one for one in self.missing if not one.is_none and not one.is_reset}

    @functools.cached_property
    def likes(self) -> bool:
        """True if a missing leaf has the shape of a free leaf."""
        return not {tuple(value.shape) for value in self.free.values()}.isdisjoint(self.unfilled_shapes.values())

    @property
    def optimizer(self) -> bool:
        """True if leaves of an optimizer's state are missing."""
        return any(map(is_in_optimizer, self.wanted))

    @property
    def unexplained(self) -> bool:
        """True if leaves are missing or left over."""
        return bool(self.missing or self.leftovers)

    @property
    def sized(self) -> bool:
        """True if a shape differs, or names of the target have numbers."""
        return bool(self.clashes) or (self.unexplained and any(map(_NUMBER.search, self.target.leaves)))

    @property
    def fed_forward(self) -> bool:
        """True if leaves of feed-forward layers are missing."""
        return any("/mlp/wi" in name for name in self.wanted)

    def without(self, names: Collection[str]) -> UnmatchedLeaves:
        """Returns the unmatched leaves without leaves that are explained."""
        return dataclasses.replace(
            self,
            missing=tuple([one for one in self.missing if one.name not in names]),
            leftovers=tuple([name for name in self.leftovers if name not in names]),
            clashes={name: problem for name, problem in self.clashes.items() if name not in names},
        )


class Remedy(NamedTuple):
    """Transforms that may fill most missing leaves, with a `reason`.

    `advice` is the fix in words, where the names do not show that the transforms are right. With a `source` they run on
    its leaves, before the transforms of the call; with `is_first` on all leaves before these; with `is_instead` on all
    leaves, and the transforms of the call do not.
    """

    transforms: tuple[Transform, ...]
    reason: str
    advice: str | None = None
    source: str = ""
    is_first: bool = False
    is_instead: bool = False


class Explanation(NamedTuple):
    """A problem, and the names of the leaves that it explains."""

    problem: Problem
    names: Collection[str]


def as_template(text: str) -> str:
    """Escapes text for the replacement of a rule."""
    return text.replace("\\", "\\\\")


def model_leaves(names: Collection[str]) -> list[str]:
    """Returns the model's names, or all names without a model."""
    return [name for name in names if not is_in_optimizer(name)] or list(names)
