"""Layers that are leaves of their own <-> layers on an axis of one leaf; nothing is read.

Towers may differ in depth. Layers are numbered 0, 1, 2, … without gaps, and every leaf of a tower has as many
layers as the others: a layer that is not there is a problem, never a shorter stack.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any

from orbax_t5x.lazy import View, stack
from orbax_t5x.transforms.arrays import OnePattern
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.patterns.table import Pattern, compile_pattern, expand, note_unused, pattern_text, rule_table
from orbax_t5x.transforms.state import NewState, normal_axis, view_of

# Ways to write a group that nothing but digits matches.
_DIGITS_ONLY = re.compile(r"(\\d|\[0-9\])([+*?]|\{\d+(,\d*)?\})?")
_LAYER_NUMBER = re.compile(r"\{i(?::(?P<format>[^{}]*))?\}")
# Missing layers named in a problem.
_SHOWN_LAYERS = 5


def _group_texts(pattern: str) -> list[str]:
    """The text inside each group of a pattern, in the order of their numbers."""
    texts: list[str] = []
    open_groups: list[tuple[int, int] | None] = []
    in_class = False
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            # A bracket right after the opening one is a member of the class.
            at += (pattern[at + 1 : at + 3] == "^]" and 2) or pattern[at + 1 : at + 2] == "]"
        elif char == "(":
            named = re.match(r"\(\?P<\w+>", pattern[at:])
            if named or pattern[at + 1 : at + 2] != "?":
                open_groups.append((len(texts), at + (named.end() if named else 1)))
                texts.append("")
            else:
                open_groups.append(None)
        elif char == ")" and open_groups:
            group = open_groups.pop()
            if group is not None:
                texts[group[0]] = pattern[group[1] : at]
        at += 1
    return texts


@functools.lru_cache(maxsize=256)
def _written_layer_group(regex: re.Pattern[str]) -> int | None:
    """The layer group that the pattern itself tells: named `i`, or the only one written as digits; or None."""
    if "i" in regex.groupindex:
        return regex.groupindex["i"]
    digits = [number + 1 for number, text in enumerate(_group_texts(regex.pattern)) if _DIGITS_ONLY.fullmatch(text)]
    if len(digits) > 1:
        raise ValueError(
            f"StackLayers: several groups of {regex.pattern!r} match digits alone; name the layer number's (?P<i>...)"
        )
    return digits[0] if digits else None


def layer_group(regex: re.Pattern[str], matches: list[re.Match[str]], diagnostics: Diagnostics) -> int | None:
    """The number of the group that is the layer number; None, and a problem, where that cannot be told."""
    written = _written_layer_group(regex)
    if written is not None:
        return written
    groups = range(1, regex.groups + 1)
    digits = [group for group in groups if all((match[group] or "").isdecimal() for match in matches)]
    if len(digits) == 1:
        return digits[0]
    diagnostics.problem(
        "rule",
        None,
        f"StackLayers {regex.pattern!r}: {len(digits) or 'none'} of its {regex.groups} groups match digits alone, "
        "so the layer number cannot be told",
        "name the layer number's group (?P<i>\\d+)",
    )
    return None


@dataclasses.dataclass(frozen=True)
class StackLayers(Transform):
    r"""Stacks the leaves of a tower's layers on a new axis.

    `StackLayers(r"(enc|dec)/layers_(?P<i>\d+)/(.*)", r"\1/layers/\3", 1)` makes `enc/layers/w` of `enc/layers_0/w`,
    `enc/layers_1/w`, …, each `(E, L, …)` from `(E, …)`.

    Attributes:
      pattern: a regex that must match a whole name. One group is the layer number: the one named `i`, or else the
        only one that matches digits alone.
      into: the new name; it may use the other groups by their own numbers.
      axis: where the new axis stands in the result.
      require_match: whether it is an error that no name matches.
    """

    pattern: Pattern
    into: str
    axis: int
    require_match: bool = True

    def __post_init__(self) -> None:
        regex = compile_pattern(self.pattern, "StackLayers")
        if not regex.groups:
            raise ValueError(f"StackLayers: {pattern_text(self.pattern)!r} has no group for the layer number")
        number = _written_layer_group(regex)
        if number is not None and re.search(rf"\\({number}(?!\d)|g<({number}|i)>)", self.into):
            raise ValueError(f"StackLayers: into {self.into!r} uses the layer number, which the stack does away with")
        object.__setattr__(self, "axis", operator.index(self.axis))

    def apply(self, source: dict[str, Any], target: Mapping[str, Any], diagnostics: Diagnostics) -> dict[str, Any]:
        """See `Transform.apply`."""
        table = rule_table((self.pattern,))
        matches = {name: match for name in source if (match := table.match(name)) is not None}
        note_unused(
            table,
            {0} if matches else set(),
            source,
            "StackLayers",
            diagnostics,
            required=self.require_match,
            what="the state dict",
        )
        group = layer_group(table.regex(0), list(matches.values()), diagnostics) if matches else None
        if group is None:
            return dict(source)
        stacks = self._collect(matches, group, diagnostics)
        depths = _depths(stacks.values(), group)
        state = NewState(diagnostics)
        for name, value in source.items():
            if name not in matches:
                state.put(name, value, name)
        for new, layers in stacks.items():
            if self._is_whole(new, layers, depths[_tower(layers, group)], diagnostics):
                self._stack(new, [layers[i].string for i in range(len(layers))], source, state, diagnostics)
            else:
                diagnostics.explained.add(new)
        return state.finish()

    def _collect(
        self, matches: Mapping[str, re.Match[str]], group: int, diagnostics: Diagnostics
    ) -> dict[str, dict[int, re.Match[str]]]:
        """New name -> layer number -> match."""
        stacks: dict[str, dict[int, re.Match[str]]] = {}
        for name, match in matches.items():
            new = expand(match, self.into, f"StackLayers {pattern_text(self.pattern)!r}", diagnostics)
            text = match[group]
            if new is None:
                continue
            if text is None or not text.isdecimal():
                message = f"StackLayers: the layer number of {name!r} is {text!r}"
                diagnostics.problem("rule", name, message, "let the group match digits alone")
                continue
            other = stacks.setdefault(new, {}).setdefault(int(text), match)
            if other is not match:
                message = f"StackLayers: {other.string!r} and {name!r} are both layer {int(text)} of {new!r}"
                diagnostics.problem(
                    "duplicate", new, message, "tell them apart by a group of the pattern that `into` uses"
                )
        return stacks

    def _is_whole(self, new: str, layers: Mapping[int, re.Match[str]], depth: int, diagnostics: Diagnostics) -> bool:
        lacking = [number for number in range(depth) if number not in layers]
        if not lacking:
            return True
        shown = ", ".join(map(str, lacking[:_SHOWN_LAYERS])) + (", …" if len(lacking) > _SHOWN_LAYERS else "")
        have = layers[min(layers)].string
        diagnostics.problem(
            "missing",
            new,
            f"StackLayers: layer {shown} of {depth} is missing for {new!r}; it has {len(layers)}, such as {have!r}",
            "leave these names out of the pattern where they do not stand in every layer",
        )
        return False

    def _stack(
        self, new: str, names: list[str], source: Mapping[str, Any], state: NewState, diagnostics: Diagnostics
    ) -> None:
        rule = f"StackLayers {pattern_text(self.pattern)!r} -> {self.into!r}"
        values = [source[name] for name in names]
        if all(value is None for value in values):
            state.put(new, None, names[0], rule)
            return
        views = [view_of(name, value, diagnostics) for name, value in zip(names, values, strict=True)]
        diagnostics.explained.add(new)
        if any(view is None for view in views):
            return
        try:
            stacked = stack(views, self.axis)
        except ValueError as error:
            diagnostics.problem(
                "shape", new, f"{rule}: {error}", "all layers need one shape and dtype, and the axis must exist"
            )
            return
        diagnostics.explained.discard(new)
        state.put(new, stacked, names[0], rule)


def _tower(layers: Mapping[int, re.Match[str]], group: int) -> str:
    """What stands before the layer number."""
    match = next(iter(layers.values()))
    return match.string[: match.start(group)]


def _depths(stacks: Iterable[Mapping[int, re.Match[str]]], group: int) -> dict[str, int]:
    """How many layers each tower has."""
    depths: dict[str, int] = {}
    for layers in stacks:
        tower = _tower(layers, group)
        depths[tower] = max(depths.get(tower, 0), max(layers) + 1)
    return depths


@dataclasses.dataclass(frozen=True)
class UnstackLayers(OnePattern):
    """Takes leaves apart along an axis: one leaf per layer, without the axis.

    Attributes:
      pattern: a regex that must match a whole name.
      into: the new names, with `{i}` for the layer number (`{i:03d}` for three digits); it may use the pattern's
        groups.
      axis: the axis of the layers.
      require_match: whether it is an error that no name matches.
    """

    pattern: Pattern
    into: str
    axis: int
    require_match: bool = True

    def __post_init__(self) -> None:
        if not _LAYER_NUMBER.search(self.into):
            raise ValueError(f"UnstackLayers: into {self.into!r} has no {{i}} for the layer number")
        self._set(axis=operator.index(self.axis))

    def _make(self, match: re.Match[str], view: View, diagnostics: Diagnostics) -> Iterable[tuple[str, View]] | None:
        axis = normal_axis(self.axis, view.ndim)
        if axis is None:
            diagnostics.problem(
                "shape", match.string, f"{self._rule()}: there is no axis {self.axis} in shape {view.shape}"
            )
            return None
        names = numbered_names(match, self.into, view.shape[axis], self._rule(), diagnostics)
        if names is None:
            return None
        before = (slice(None),) * axis
        return [(name, view[(*before, number)]) for number, name in enumerate(names)]


def numbered_names(
    match: re.Match[str], into: str, count: int, rule: str, diagnostics: Diagnostics
) -> list[str] | None:
    """The names that a template with `{i}` gives for numbers from 0; None, and a problem, where it names a bad
    group.
    """
    # The number is no part of a group reference: in "\\1{i}" layer 0 is not group 10.
    pieces: list[str] = []
    formats: list[str] = []
    at = 0
    for field in _LAYER_NUMBER.finditer(into):
        pieces.append(into[at : field.start()])
        formats.append(field["format"] or "")
        at = field.end()
    texts = [expand(match, piece, rule, diagnostics) for piece in (*pieces, into[at:])]
    if any(text is None for text in texts):
        return None
    *heads, tail = texts
    return [
        "".join(f"{head}{number:{form}}" for head, form in zip(heads, formats, strict=True)) + str(tail)
        for number in range(count)
    ]
