"""Leaves cut along an axis, and joined: layers and parts.

Towers may differ in depth. Layers are numbered 0, 1, 2, … without gaps, and every leaf of a tower has as many
layers as the others: a layer that is not there is a problem, never a shorter stack.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import View
from orbax_t5x.lazy.several import concatenate, stack
from orbax_t5x.transforms.base import Given
from orbax_t5x.transforms.by_rules import ByRules, Matches, OnePattern
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState, combine_leaves
from orbax_t5x.transforms.patterns.table import (
    Pattern,
    compile_pattern,
    expand,
    has_no_empty_part,
    new_name,
    pattern_text,
    pattern_tuple,
)
from orbax_t5x.trees.flat import FlatState

# The beginning of a group that matches only digits, such as `(\d+)` or `(?P<n>[0-9]{2})`.
_DIGITS_GROUP = re.compile(r"(?<!\\)\((?:\?P<(?P<name>\w+)>)?(?=(?:\\d|\[0-9\])(?:[+*?]|\{\d+(?:,\d*)?\})?\))")
LAYER_NUMBER = re.compile(r"\{i(?:\*(?P<step>\d+)\+(?P<first>[^{}:]+))?(?::(?P<format>[^{}]*))?\}")
# In `into` of a stack: the layer's place in a block of so many, each of which is stacked by itself.
IN_BLOCK = re.compile(r"\{i%(\d+)\}")
# More layers than any model has: a name may hold any number, and a shape without elements may claim any size.
MOST_LAYERS = 100_000
# Missing layers named in a problem.
_SHOWN_LAYERS = 5


@functools.lru_cache(maxsize=256)
def written_layer_group(regex: re.Pattern[str], owner: str) -> int | None:
    """Finds the layer group in the pattern's text, or None."""
    if "i" in regex.groupindex:
        return regex.groupindex["i"]
    numbers: set[int] = set()
    for found in _DIGITS_GROUP.finditer(regex.pattern):
        # The regex engine numbers the groups: the one in question gets a name. Inside a class it is no group.
        named = f"{regex.pattern[: found.start()]}(?P<i>{regex.pattern[found.end() :]}"
        groups = regex if found["name"] else re.compile(named, regex.flags)
        numbers.add(groups.groupindex.get(found["name"] or "i", 0))
    numbers.discard(0)
    if len(numbers) > 1:
        raise ValueError(
            f"{owner}: several groups of {regex.pattern!r} match only digits; name the layer number's (?P<i>...)"
        )
    return numbers.pop() if numbers else None


def layer_group(matches: Sequence[re.Match[str]], owner: str, diagnostics: Diagnostics) -> int | None:
    """Returns the layer group's number, or records a problem."""
    regex = matches[0].re
    written = written_layer_group(regex, owner)
    if written is not None:
        return written
    groups = range(1, regex.groups + 1)
    digits = [group for group in groups if all((match[group] or "").isdecimal() for match in matches)]
    if len(digits) == 1:
        return digits[0]
    message = f"{len(digits) or 'none'} of its {regex.groups} groups match only digits"
    message = f"{owner} {regex.pattern!r}: {message}, so it is not clear which is the layer number"
    diagnostics.problem("rule", None, message, Fix("name the layer number's group (?P<i>\\d+)"))
    return None


def layer_number(match: re.Match[str], group: int, owner: str, diagnostics: Diagnostics) -> int | None:
    """Returns a name's layer number, or records a problem."""
    name, text = match.string, match[group]
    if text is None or not text.isdecimal():
        message = f"{owner}: the layer number of {name!r} is {text!r}"
        diagnostics.problem("rule", name, message, Fix("let the group match only digits"))
        return None
    if int(text) >= MOST_LAYERS:
        message = f"{owner}: the layer number of {name!r} is beyond {MOST_LAYERS} layers"
        diagnostics.problem("rule", name, message, Fix("let the group match only the layer number"))
        return None
    return int(text)


@dataclasses.dataclass(frozen=True)
class StackLayers(ByRules):
    r"""Stack of the leaves of a tower's layers on a new axis.

    Attributes:
      pattern: a regex that must match a whole name. One group is the layer number: the one named `i`, or else the
        only one that matches only digits.
      into: the new name; it may use the other groups by their own numbers. With `{i%6}`, the layer's place in a block
        of 6, layer i is the block i // 6 of that stack.
      axis: the position of the new axis in the result.
      require_match: whether it is an error that no name matches.

    Example:
      >>> stack = ot.transforms.StackLayers(r"(enc|dec)/layers_(?P<i>\d+)/(.*)", r"\1/layers/\3", axis=1)
      >>> stacked = stack({"enc": {"layers_0": {"w": np.zeros(4)}, "layers_1": {"w": np.ones(4)}}}, {})
      >>> stacked["enc"]["layers"]["w"].shape
      (4, 2)
    """

    pattern: Pattern
    into: str
    axis: int
    require_match: bool = True

    def __post_init__(self) -> None:
        regex = compile_pattern(self.pattern, "StackLayers")
        if (block := IN_BLOCK.search(self.into)) is not None and int(block[1]) < 1:
            raise ValueError(f"StackLayers: a block of {block[1]} layers in {self.into!r}")
        if not regex.groups:
            raise ValueError(f"StackLayers: {pattern_text(self.pattern)!r} has no group for the layer number")
        number = written_layer_group(regex, "StackLayers")
        if number is not None and re.search(rf"\\({number}(?!\d)|g<({number}|i)>)", self.into):
            raise ValueError(
                f"StackLayers: into {self.into!r} uses the layer number, which the stacked leaf does not have"
            )
        object.__setattr__(self, "axis", operator.index(self.axis))

    def _rule(self) -> str:
        return f"StackLayers {pattern_text(self.pattern)!r} -> {self.into!r}"

    def _build(self, state: FlatState, matches: Matches, new: NewState, diagnostics: Diagnostics) -> None:
        found = [match for _, match in matches.values()]
        group = layer_group(found, "StackLayers", diagnostics) if found else None
        for name, value in state.items():
            if name not in matches or group is None:
                new.put(name, value, name)
        if group is None:
            return
        stacks = self._collect(found, group, diagnostics)
        depths = _depths(stacks.values(), group)
        for stacked, layers in stacks.items():
            if self._is_complete(stacked, layers, depths[_tower_text(layers, group)], diagnostics):
                leaves = {layers[number].string: state[layers[number].string] for number in range(len(layers))}
                self._stack(stacked, leaves, new, diagnostics)

    def _collect(
        self, matches: Iterable[re.Match[str]], group: int, diagnostics: Diagnostics
    ) -> dict[str, dict[int, re.Match[str]]]:
        """Returns name of the stacked leaf -> layer number -> match."""
        stacks: dict[str, dict[int, re.Match[str]]] = {}
        for match in matches:
            name = match.string
            number = layer_number(match, group, "StackLayers", diagnostics)
            if number is None:
                continue
            into = self.into
            if (block := IN_BLOCK.search(into)) is not None:  # the stack of its place in a block, and the block
                size = int(block[1])
                into, number = IN_BLOCK.sub(str(number % size), into), number // size
            stacked = new_name(match, into, f"StackLayers {pattern_text(self.pattern)!r}", diagnostics)
            if stacked is None:
                continue
            other = stacks.setdefault(stacked, {}).setdefault(number, match)
            if other is not match:
                message = f"StackLayers: {other.string!r} and {name!r} are both layer {number} of {stacked!r}"
                fix = "distinguish them by a group of the pattern that `into` uses"
                diagnostics.problem("duplicate", stacked, message, Fix(fix))
        return stacks

    def _is_complete(
        self, stacked: str, layers: Mapping[int, re.Match[str]], depth: int, diagnostics: Diagnostics
    ) -> bool:
        """Records a problem for each missing layer."""
        if len(layers) == depth:
            return True
        lacking = (str(number) for number in range(depth) if number not in layers)
        # Not all of them are made: a tower of few layers may have one with a high number.
        first = list(itertools.islice(lacking, _SHOWN_LAYERS))
        left = depth - len(layers) - len(first)
        shown = ", ".join(first) + (f" and {left:,} more" if left else "")
        has = f"it has {len(layers)}, such as {layers[min(layers)].string!r}"
        message = f"StackLayers: layer {shown} of {depth} is missing for {stacked!r}; {has}"
        fix = Fix("leave these names out of the pattern where not every layer has them")
        diagnostics.problem("missing", stacked, message, fix)
        return False

    def _stack(self, stacked: str, leaves: FlatState, new: NewState, diagnostics: Diagnostics) -> None:
        first = next(iter(leaves))
        if all(value is None for value in leaves.values()):
            new.put(stacked, None, first, self._rule())
            return
        advice, rule = "all layers need one shape and dtype, and the axis must exist", self._rule()
        stack_of = functools.partial(stack, axis=self.axis)
        value = combine_leaves(leaves.items(), stack_of, diagnostics, becomes=stacked, rule=rule, advice=advice)
        if value is not None:
            new.put(stacked, value, first, rule)


def _tower_text(layers: Mapping[int, re.Match[str]], group: int) -> str:
    """Returns the text before the layer number."""
    match = next(iter(layers.values()))
    return match.string[: match.start(group)]


def _depths(stacks: Iterable[Mapping[int, re.Match[str]]], group: int) -> dict[str, int]:
    """Counts the layers of each tower."""
    depths: dict[str, int] = {}
    for layers in stacks:
        tower = _tower_text(layers, group)
        depths[tower] = max(depths.get(tower, 0), max(layers) + 1)
    return depths


@dataclasses.dataclass(frozen=True)
class UnstackLayers(OnePattern):
    r"""Split of leaves along an axis into a leaf per layer.

    Attributes:
      pattern: a regex that must match a whole name.
      into: the new names, with `{i}` for the layer number (`{i:03d}` for three digits); it may use the pattern's
        groups. `{i*6+\1}` numbers blocks of 6 layers, with a group for the place in a block.
      axis: the axis of the layers.
      require_match: whether it is an error that no name matches.

    Example:
      >>> unstack = ot.transforms.UnstackLayers("enc/layers/(.*)", r"enc/layers_{i}/\1", axis=1)
      >>> jax.tree.map(np.shape, unstack({"enc": {"layers": {"w": np.ones((4, 2))}}}, {}))
      {'enc': {'layers_0': {'w': (4,)}, 'layers_1': {'w': (4,)}}}
    """

    pattern: Pattern
    into: str
    axis: int
    require_match: bool = True

    def __post_init__(self) -> None:
        if not LAYER_NUMBER.search(self.into):
            raise ValueError(f"UnstackLayers: into {self.into!r} has no {{i}} for the layer number")
        self._set(axis=operator.index(self.axis))

    def _make(self, match: re.Match[str], view: View, diagnostics: Diagnostics) -> Iterable[tuple[str, View]] | None:
        axis = self._axis_of(view, self.axis, match.string, diagnostics)
        if axis is None:
            return None
        names = numbered_names(match, self.into, view.shape[axis], self._rule(), diagnostics)
        if names is None:
            return None
        before = (slice(None),) * axis
        return [(name, view[(*before, number)]) for number, name in enumerate(names)]


def numbered_names(
    match: re.Match[str], into: str, count: int, rule: str, diagnostics: Diagnostics
) -> list[str] | None:
    """Fills numbers into a template, or records a problem."""
    if count > MOST_LAYERS:
        message = f"{rule}: {count} layers, and {MOST_LAYERS} are the most"
        diagnostics.problem("shape", match.string, message, Fix("check the axis"))
        return None
    # The number is no part of a group reference: in "\\1{i}" layer 0 is not group 10.
    pieces: list[str] = []
    formats: list[tuple[int, int, str]] = []
    at = 0
    for field in LAYER_NUMBER.finditer(into):
        first = expand(match, field["first"] or "0", rule, diagnostics)
        if first is None or not first.isdecimal():
            diagnostics.problem("rule", match.string, f"{rule}: {first!r} is no number", Fix("give a group of digits"))
            return None
        pieces.append(into[at : field.start()])
        formats.append((int(field["step"] or 1), int(first), field["format"] or ""))
        at = field.end()
    texts = [expand(match, piece, rule, diagnostics) for piece in (*pieces, into[at:])]
    if any(text is None for text in texts):
        return None
    *heads, tail = texts
    names = [
        "".join(
            f"{head}{number * step + first:{form}}" for head, (step, first, form) in zip(heads, formats, strict=True)
        )
        + str(tail)
        for number in range(count)
    ]
    return names if all(has_no_empty_part(name, match.string, rule, diagnostics) for name in names[:1]) else None


@dataclasses.dataclass(frozen=True)
class Split(OnePattern):
    r"""Split of leaves into several along an axis.

    Attributes:
      pattern: a regex that must match a whole name.
      into: the new names in order; each may use the pattern's groups.
      axis: along which to cut.
      sizes: of the parts, in order; None for equal parts. They must add up to the axis.
      require_match: whether it is an error that no name matches.

    Example:
      >>> split = ot.transforms.Split("(.*)/qkv", [r"\1/q", r"\1/k", r"\1/v"], axis=0)
      >>> jax.tree.map(np.shape, split({"attention": {"qkv": np.ones((6, 4))}}, {}))
      {'attention': {'k': (2, 4), 'q': (2, 4), 'v': (2, 4)}}
    """

    pattern: Pattern
    into: Given[Iterable[str], tuple[str, ...]]
    axis: int
    sizes: Sequence[int] | None = None
    require_match: bool = True

    def __post_init__(self) -> None:
        into = tuple(self.into)
        if isinstance(self.into, str) or not into or not all(isinstance(item, str) for item in into):
            raise ValueError(f"Split: into is the names of the parts, not {self.into!r}")
        sizes = None if self.sizes is None else tuple(operator.index(size) for size in self.sizes)
        if sizes is not None and (len(sizes) != len(into) or min(sizes) < 0):
            raise ValueError(f"Split: {len(into)} names and sizes {sizes}")
        self._set(into=into, axis=operator.index(self.axis), sizes=sizes)

    def _make(self, match: re.Match[str], view: View, diagnostics: Diagnostics) -> Iterable[tuple[str, View]] | None:
        name = match.string
        axis = self._axis_of(view, self.axis, name, diagnostics)
        if axis is None:
            return None
        size, count = view.shape[axis], len(self.into)
        sizes = self.sizes if self.sizes is not None else (size // count,) * count
        if sum(sizes) != size:
            parts = f"{count} equal parts" if self.sizes is None else f"parts of {sizes}"
            message = f"{self._rule()}: axis {axis} of shape {view.shape} is not made of {parts}"
            diagnostics.problem("shape", name, message, Fix(f"give sizes= that add up to {size}"))
            return None
        made = []
        start = 0
        for template, part in zip(self.into, sizes, strict=True):
            new = new_name(match, template, self._rule(), diagnostics)
            if new is None:
                return None
            made.append((new, view[(slice(None),) * axis + (slice(start, start + part),)]))
            start += part
        return made


@dataclasses.dataclass(frozen=True)
class Concat(ByRules):
    r"""Concatenation of leaves along an axis, in the order of the patterns.

    Attributes:
      patterns: one regex per part, in order; each must match a whole name.
      into: the new name; it may use the groups of each pattern. Leaves that give the same new name are joined.
      axis: along which to join.
      require_match: whether it is an error that a pattern matches no name.

    Example:
      >>> join = ot.transforms.Concat(["(.*)/wi_0", "(.*)/wi_1"], r"\1/wi", axis=1)
      >>> join({"mlp": {"wi_0": np.ones((4, 8)), "wi_1": np.ones((4, 8))}}, {})["mlp"]["wi"].shape
      (4, 16)
    """

    patterns: Given[Pattern | Iterable[Pattern], tuple[Pattern, ...]]
    into: str
    axis: int
    require_match: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", pattern_tuple(self.patterns, "Concat"))
        object.__setattr__(self, "axis", operator.index(self.axis))
        if not isinstance(self.into, str):
            raise TypeError(f"Concat: into is a name, not {self.into!r}")

    def _patterns(self) -> tuple[Pattern, ...]:
        return self.patterns

    def _build(self, state: FlatState, matches: Matches, new: NewState, diagnostics: Diagnostics) -> None:
        groups: dict[str, dict[int, str]] = {}
        for name, value in state.items():
            if name not in matches:
                new.put(name, value, name)
                continue
            index, match = matches[name]
            joined = new_name(match, self.into, f"Concat {pattern_text(self.patterns[index])!r}", diagnostics)
            if joined is None:
                continue
            other = groups.setdefault(joined, {}).setdefault(index, name)
            if other != name:
                message = f"Concat: {other!r} and {name!r} are both part {index} of {joined!r}"
                fix = "distinguish them by a group of the pattern that `into` uses"
                diagnostics.problem("duplicate", joined, message, Fix(fix))
        for joined, parts in groups.items():
            value = self._join(joined, [(i, parts[i], state[parts[i]]) for i in sorted(parts)], diagnostics)
            if value is not None:
                new.put(joined, value, parts[min(parts)], f"Concat of {len(parts)} into {self.into!r}")

    def _join(self, joined: str, parts: Sequence[tuple[int, str, Any]], diagnostics: Diagnostics) -> View | None:
        """Joins leaves, or records a problem."""
        present = {index for index, _, _ in parts}
        lacking = [pattern_text(pattern) for index, pattern in enumerate(self.patterns) if index not in present]
        if lacking:
            message = f"Concat: nothing matches {lacking} for {joined!r}, which has {[name for _, name, _ in parts]}"
            diagnostics.problem("missing", joined, message, Fix("give it all its parts, or narrow the patterns"))
            return None
        leaves, join = [part[1:] for part in parts], functools.partial(concatenate, axis=self.axis)
        advice = "cast or reshape the inputs first"
        return combine_leaves(leaves, join, diagnostics, becomes=joined, rule="Concat", advice=advice)
