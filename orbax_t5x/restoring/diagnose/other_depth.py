"""Hypothesis: the two models differ in the number of their layers.

Layers have numbers in their names, or one dimension of the leaves below a name for layers counts them. `RepeatLayers`
is proposed only where all leaves of a layer have the same shapes on both sides.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from orbax_t5x import transforms
from orbax_t5x.errors import Fix, Problem
from orbax_t5x.optim.optimizer_names import may_be_moment
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Shapes, UnmatchedLeaves
from orbax_t5x.restoring.diagnose.other_shapes import changed_sizes, is_layer_word, stacked_part
from orbax_t5x.restoring.diagnose.unexplained import fill_new, leave_unread
from orbax_t5x.text.wording import counted
from orbax_t5x.transforms import Transform
from orbax_t5x.trees.subtrees import exact_patterns

_NUMBER = re.compile(r"(?<!\d)\d+(?=[/.])")
_CUT = re.compile(r"[/.]")
# What holds a whole model, and is no name for a tower of layers.
_ROOT = re.compile(r"(?:(?:target|params|model|module|transformer|state|base)[/.])*")
_BUILD = Fix.by_target("build the model with the checkpoint's number of layers")


class _Change(NamedTuple):
    """Change of the number of layers.

    Attributes:
      old: the checkpoint's number of layers.
      new: the target's.
      is_alike: whether layers have the same leaves on both sides.
      axis: dimension that counts the layers; None for layers with numbers.
    """

    old: int
    new: int
    is_alike: bool
    axis: int | None


def other_depth(unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
    """Explains layers that only one side has, for all towers that differ alike in one problem."""
    towers: dict[_Change, list[str]] = collections.defaultdict(list)
    for before, change in (*_numbered_towers(unmatched), *_stacked_towers(unmatched)):
        towers[change].append(before)
    for change, befores in towers.items():
        places = unmatched.clashes if change.axis is not None else [*unmatched.wanted, *unmatched.leftovers]
        names = [name for name in places if any(_is_of_tower(name, before, change) for before in befores)]
        if names:
            yield Explanation(_problem(change, befores, names, unmatched), names)


def _is_of_tower(name: str, before: str, change: _Change) -> bool:
    """Returns True if a leaf, or a moment of it, belongs to a layer that only one side has."""
    own = re.escape(before)
    if may_be_moment(name):
        own = rf".*(?<![A-Za-z0-9]){re.escape(_ROOT.sub('', before, count=1))}"
    match = re.match(own + ("" if change.axis is not None else r"(\d+)[/.]"), name)
    return match is not None and (change.axis is not None or int(match[1]) >= min(change.old, change.new))


def _problem(change: _Change, befores: Sequence[str], names: Sequence[str], unmatched: UnmatchedLeaves) -> Problem:
    towers = sorted({tower for before in befores if (tower := _tower_name(before, change.axis))})
    owner = f"checkpoint's {' and '.join(towers)}" if towers else "checkpoint"
    message = (
        f"the {owner} {'have' if len(towers) > 1 else 'has'} {counted(change.old, 'layer')}, "
        f"{change.new} {'is' if change.new == 1 else 'are'} wanted"
    )
    ways = [_BUILD]
    if change.is_alike and unmatched.takes_rules:
        ways.insert(0, Fix.adding(_repeating(change, befores)))
        message += f"; RepeatLayers makes layer i a copy of layer i * {change.old} // {change.new}"
    if change.axis is not None:
        return Problem("shape", None, message, Fix.any_of(*ways))
    if change.new < change.old:
        return Problem("leftover", None, message, Fix.any_of(*ways, *leave_unread(unmatched).ways))
    patterns = exact_patterns(names, list(unmatched.target.leaves))
    new = fill_new(patterns, unmatched, "if the others are new").in_words()
    return Problem("missing", None, message, Fix.any_of(*ways, new))


def _tower_name(before: str, axis: int | None) -> str:
    """Returns the tower's name; empty for a model with a single tower."""
    parts = [part for part in _CUT.split(_ROOT.sub("", before, count=1)) if part]
    if axis is None or (len(parts) > 1 and (is_layer_word(parts[-1]) or parts[-1] == parts[-2])):
        parts = parts[:-1]
    return parts[-1] if parts else ""


def _repeating(change: _Change, befores: Sequence[str]) -> Transform:
    patterns = [re.escape(before) for before in befores]
    pattern = patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"
    rest = r"(\d+)[/.].*" if change.axis is None else ".*"
    return transforms.RepeatLayers(pattern + rest, change.new, axis=change.axis)


def _numbered_towers(unmatched: UnmatchedLeaves) -> Iterator[tuple[str, _Change]]:
    """Yields the text before the number of layers, and how many there are."""
    stored = {name: tuple(value.shape) for name, value in unmatched.arrays.items()}
    target = {name: leaf.shape for name, leaf in unmatched.target.leaves.items() if leaf.kind not in ("keep", "none")}
    ours = _layers(target)
    for before, layers in _layers(stored).items():
        wanted = ours.get(before, {})
        old, new = (max(numbers, default=-1) + 1 for numbers in (layers, wanted))
        if wanted and old != new:
            more, fewer = (layers, wanted) if old > new else (wanted, layers)
            is_whole = len(layers) == old and len(wanted) == new
            is_alike = all(layers.get(number) == wanted.get(number) for number in fewer)
            is_alike = is_alike and all(layer in fewer.values() for layer in more.values())
            yield before, _Change(old, new, is_whole and is_alike, None)


def _layers(shapes: Shapes) -> Mapping[str, dict[int, dict[str, tuple[int, ...]]]]:
    """Maps the text before a layer's number, the number, and the text after it to shapes."""
    layers: dict[str, dict[int, dict[str, tuple[int, ...]]]] = {}
    for name, shape in shapes.items():
        for match in _NUMBER.finditer(name) if not may_be_moment(name) else ():
            before = name[: match.start()]
            if is_layer_word(_CUT.split(before.rstrip("/._"))[-1]):
                layers.setdefault(before, {}).setdefault(int(match[0]), {})[name[match.end() :]] = shape
    return layers


def _stacked_towers(unmatched: UnmatchedLeaves) -> Iterator[tuple[str, _Change]]:
    """Yields the names of what holds all layers, if one dimension of all its leaves is another."""
    changes: dict[str, list[_Change | None]] = collections.defaultdict(list)
    for name, leaf in unmatched.target.leaves.items():
        container = None if may_be_moment(name) else stacked_part(name)
        if container is not None:
            value = unmatched.arrays.get(name) if name in unmatched.clashes else None
            changes[container].append(None if value is None else _change_between(value.shape, leaf.shape))
    for container, of_leaves in changes.items():
        (change, *others) = of_leaves
        if change is not None and others and set(others) == {change}:
            yield container, change


def _change_between(shape: Sequence[int], wanted: Sequence[int]) -> _Change | None:
    """Returns the change of the only dimension that differs, or None."""
    sizes = changed_sizes(shape, wanted)
    axis = 0 if sizes is None else list(zip(shape, wanted, strict=True)).index(sizes)
    return None if sizes is None else _Change(*sizes, True, axis)
