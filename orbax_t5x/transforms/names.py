"""Transforms that change names, or select leaves by names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import LazyArray
from orbax_t5x.transforms.base import FollowingOnRequest, Given
from orbax_t5x.transforms.by_rules import ByRules, Matches
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState
from orbax_t5x.transforms.patterns.table import Pattern, Rule, new_name, pattern_tuple, rule_text, rule_tuple
from orbax_t5x.trees.flat import FlatState, NameClashError, StateDict, flatten


@dataclasses.dataclass(frozen=True)
class Intersect(FollowingOnRequest):
    """T5X's `intersect_state`: drops leaves that the target lacks.

    Example:
      >>> ot.transforms.Intersect()({"kernel": 1, "bias": 2}, {"kernel": ...})
      {'kernel': 1}
    """

    @property
    def only_selects(self) -> bool:
        return True

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        return {name: value for name, value in state.items() if name in target}


@dataclasses.dataclass(frozen=True, eq=False)
class Merge(FollowingOnRequest):
    """T5X's `merge_state`: adds the leaves of another state dict.

    Equal when the names are and each leaf is the same object or holds equal numbers. The digest counts names and the
    contents of arrays; with more than 256 MiB of them there is none.

    Attributes:
      from_scratch_state: nested (or a flat) state dict; it is not changed. Its arrays are kept as they are, not copied.
      overwrite: whether its leaves win where the state has the name, too.

    Example:
      >>> ot.transforms.Merge({"head": {"bias": 0}})({"encoder": {"w": 1}}, {})
      {'encoder': {'w': 1}, 'head': {'bias': 0}}
    """

    from_scratch_state: StateDict = dataclasses.field(repr=False)
    overwrite: bool = False
    _flat: dict[str, Any] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_flat", flatten(self.from_scratch_state))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Merge):
            return NotImplemented
        return (
            self.overwrite == other.overwrite
            and self._flat.keys() == other._flat.keys()
            and all(_same_leaf(value, other._flat[name]) for name, value in self._flat.items())
        )

    def __hash__(self) -> int:
        return hash((self.overwrite, frozenset(self._flat)))

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        added = {name: value for name, value in self._flat.items() if self.overwrite or name not in state}
        flat = {**state, **added}
        diagnostics.rule_for.update(dict.fromkeys(added, "Merge"))
        clash = _leaf_above_leaf(flat)
        if clash is not None:
            error = NameClashError(*clash)
            diagnostics.problem("duplicate", clash[0], str(error), Fix("rename or drop one of the two before merging"))
        return flat

    def describe(self) -> str:
        """Returns a line for people."""
        count = len(self._flat)
        return f"Merge({count} {'leaf' if count == 1 else 'leaves'}{', overwrite=True' if self.overwrite else ''})"


def _same_leaf(mine: Any, other: Any) -> bool:
    if mine is other:
        return True
    if isinstance(mine, LazyArray) or isinstance(other, LazyArray):
        return False
    if hasattr(mine, "dtype") and hasattr(other, "dtype"):
        return mine.dtype == other.dtype and np.array_equal(np.asarray(mine), np.asarray(other))
    return type(mine) is type(other) and bool(mine == other)


def _leaf_above_leaf(flat: FlatState) -> tuple[str, str] | None:
    """Finds a name that is another leaf's path."""
    for name in flat:
        end = name.rfind("/")
        while end > 0:
            if name[:end] in flat:
                return name[:end], name
            end = name.rfind("/", 0, end)
    return None


@dataclasses.dataclass(frozen=True)
class Rename(ByRules):
    r"""Renaming of leaves by the first rule that matches.

    Names without a rule stay. All renames happen at once, so rules may swap names. Two leaves that land on one name
    are an error, and so is a new name with an empty part.

    Attributes:
      rules: pairs (regex, replacement); a regex must match a whole name; the replacement may use its groups, None
        drops the leaf.
      require_match: whether a rule that matches no name is an error.

    Example:
      >>> rename = ot.transforms.Rename([(r"layer_(\d+)/(.*)", r"encoder/layers_\1/\2"), ("head/.*", None)])
      >>> rename({"layer_0": {"w": 1}, "head": {"b": 2}, "step": 3}, {})
      {'encoder': {'layers_0': {'w': 1}}, 'step': 3}
    """

    rules: Given[Iterable[Rule], tuple[Rule, ...]]
    require_match: bool = True

    takes_names: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", rule_tuple(self.rules, "Rename"))

    def _patterns(self) -> tuple[Pattern, ...]:
        return tuple(pattern for pattern, _ in self.rules)

    def _place(self, rule: int, match: re.Match[str], value: Any, new: NewState, diagnostics: Diagnostics) -> None:
        replacement = self.rules[rule][1]
        if replacement is None:
            return
        text = rule_text("Rename", self.rules[rule])
        name = new_name(match, replacement, text, diagnostics)
        if name is not None:
            new.put(name, value, match.string, text)


@dataclasses.dataclass(frozen=True)
class _Select(ByRules):
    """Base of transforms that select leaves by their names."""

    patterns: Given[Pattern | Iterable[Pattern], tuple[Pattern, ...]]
    require_match: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", pattern_tuple(self.patterns, type(self).__name__))

    @property
    def only_selects(self) -> bool:
        return True

    def _patterns(self) -> tuple[Pattern, ...]:
        return self.patterns


@dataclasses.dataclass(frozen=True)
class Drop(_Select):
    """Removal of the leaves with matching names.

    Attributes:
      patterns: one regex or several; each must match a whole name.
      require_match: whether a pattern that matches no name is an error.

    Example:
      >>> ot.transforms.Drop(["opt_state/.*"])({"params": {"w": 1}, "opt_state": {"mu": 2}}, {})
      {'params': {'w': 1}}
    """

    takes_names: ClassVar[bool] = True

    def _build(self, state: FlatState, matches: Matches, new: NewState, diagnostics: Diagnostics) -> None:
        new.flat.update((name, value) for name, value in state.items() if name not in matches)


@dataclasses.dataclass(frozen=True)
class Keep(_Select):
    """Removal of the leaves with other names.

    Attributes:
      patterns: one regex or several; each must match a whole name.
      require_match: whether a pattern that matches no name is an error.

    Example:
      >>> ot.transforms.Keep(["params/.*"])({"params": {"w": 1}, "opt_state": {"mu": 2}}, {})
      {'params': {'w': 1}}
    """

    follow: bool = dataclasses.field(default=False, init=False, repr=False)

    def _build(self, state: FlatState, matches: Matches, new: NewState, diagnostics: Diagnostics) -> None:
        new.flat.update((name, value) for name, value in state.items() if name in matches)
