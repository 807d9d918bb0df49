"""Transforms of names alone: which leaf stands where. Leaves are passed on as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from orbax_t5x.lazy import LazyArray
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.patterns.table import (
    Pattern,
    Rule,
    note_bad_group,
    note_unused,
    pattern_tuple,
    rule_table,
    rule_text,
    rule_tuple,
)
from orbax_t5x.transforms.state import NewState
from orbax_t5x.trees.flat import NameClashError, flatten


@dataclasses.dataclass(frozen=True)
class Intersect(Transform):
    """T5X's `intersect_state`: drops every leaf whose name the target lacks."""

    def apply(self, source: dict[str, Any], target: Mapping[str, Any], diagnostics: Diagnostics) -> dict[str, Any]:
        """See `Transform.apply`."""
        diagnostics.drop(name for name in source if name not in target)
        return {name: value for name, value in source.items() if name in target}


@dataclasses.dataclass(frozen=True, eq=False)
class Merge(Transform):
    """T5X's `merge_state`: adds the leaves of another state dict.

    Equal when the names are and each leaf is the same object or holds equal numbers. The digest counts names,
    shapes and dtypes.

    Attributes:
      from_scratch_state: nested (or a flat) state dict; it is not changed. Its arrays are kept as they are, not copied.
      overwrite: whether its leaves win where the state has the name, too.
    """

    from_scratch_state: Mapping[str, Any] = dataclasses.field(repr=False)
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

    def apply(self, source: dict[str, Any], target: Mapping[str, Any], diagnostics: Diagnostics) -> dict[str, Any]:
        """See `Transform.apply`."""
        flat = dict(source)
        for name, value in self._flat.items():
            if name in flat and not self.overwrite:
                continue
            if name in flat:
                diagnostics.drop([name])
            flat[name] = value
            diagnostics.rule_for[name] = "Merge"
        clash = _leaf_above_leaf(flat)
        if clash is not None:
            error = NameClashError(*clash)
            diagnostics.problem("duplicate", clash[0], str(error), "rename or drop one of the two before merging")
        return flat

    def describe(self) -> str:
        """One line for people."""
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


def _leaf_above_leaf(flat: Mapping[str, Any]) -> tuple[str, str] | None:
    """A name that is the path of another, and that other; None if there is none."""
    for name in flat:
        end = name.rfind("/")
        while end > 0:
            if name[:end] in flat:
                return name[:end], name
            end = name.rfind("/", 0, end)
    return None


@dataclasses.dataclass(frozen=True)
class Rename(Transform):
    """Renames leaves: for every name in the state dict the first rule that matches it gives the new name.

    Names without a rule stay. All renames happen at once, so rules may swap names. Two leaves that land on one name
    are an error.

    Attributes:
      rules: pairs (regex, replacement); a regex must match a whole name; the replacement may use its groups, None
        drops the leaf.
      require_match: whether a rule that matches no name is an error.
    """

    rules: tuple[Rule, ...]
    require_match: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", rule_tuple(self.rules, "Rename"))

    def apply(self, source: dict[str, Any], target: Mapping[str, Any], diagnostics: Diagnostics) -> dict[str, Any]:
        """See `Transform.apply`."""
        table = rule_table(tuple(pattern for pattern, _ in self.rules))
        texts = [rule_text("Rename", rule) for rule in self.rules]
        used: set[int] = set()
        state = NewState(diagnostics)
        for name, value in source.items():
            found = table.first(name)
            if found is None:
                state.put(name, value, name)
                continue
            used.add(found[0])
            replacement = self.rules[found[0]][1]
            if replacement is None:
                diagnostics.drop([name])
                continue
            try:
                state.put(table.expand(found, name, replacement), value, name, texts[found[0]])
            except ValueError as error:
                note_bad_group(texts[found[0]], error, name, diagnostics)
        note_unused(table, used, source, "Rename", diagnostics, required=self.require_match, what="the state dict")
        return state.finish()


@dataclasses.dataclass(frozen=True)
class Drop(Transform):
    """Takes out the leaves whose names match.

    Attributes:
      patterns: one regex or several; each must match a whole name.
      require_match: whether a pattern that matches no name is an error.
    """

    patterns: tuple[Pattern, ...]
    require_match: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", pattern_tuple(self.patterns, type(self).__name__))

    def apply(self, source: dict[str, Any], target: Mapping[str, Any], diagnostics: Diagnostics) -> dict[str, Any]:
        """See `Transform.apply`."""
        return _sift(self.patterns, source, type(self).__name__, diagnostics, keep=False, required=self.require_match)


@dataclasses.dataclass(frozen=True)
class Keep(Transform):
    """Takes out the leaves whose names do not match.

    Attributes:
      patterns: one regex or several; each must match a whole name.
      require_match: whether a pattern that matches no name is an error.
    """

    patterns: tuple[Pattern, ...]
    require_match: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", pattern_tuple(self.patterns, type(self).__name__))

    def apply(self, source: dict[str, Any], target: Mapping[str, Any], diagnostics: Diagnostics) -> dict[str, Any]:
        """See `Transform.apply`."""
        return _sift(self.patterns, source, type(self).__name__, diagnostics, keep=True, required=self.require_match)


def _sift(
    patterns: tuple[Pattern, ...],
    source: dict[str, Any],
    owner: str,
    diagnostics: Diagnostics,
    *,
    keep: bool,
    required: bool,
) -> dict[str, Any]:
    table = rule_table(patterns)
    used: set[int] = set()
    flat = {}
    for name, value in source.items():
        found = table.first(name)
        if found is not None:
            used.add(found[0])
        if (found is not None) is keep:
            flat[name] = value
        else:
            diagnostics.drop([name])
    note_unused(table, used, source, owner, diagnostics, required=required, what="the state dict")
    return flat
