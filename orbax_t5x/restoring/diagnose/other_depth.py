"""Hypotheses on sizes: the number of layers, or their width.

Layers have numbers in their names, or one dimension of several leaves counts them. `RepeatLayers` is proposed only
where the names say that these are layers, and all leaves of a layer have the same shapes on both sides.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from orbax_t5x import transforms
from orbax_t5x.errors import Fix, Problem
from orbax_t5x.optim.containers import may_be_moment
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Shapes, UnmatchedLeaves
from orbax_t5x.restoring.diagnose.other_shapes import is_layer_word, is_table, stacked_part
from orbax_t5x.restoring.diagnose.unexplained import fill_new, leave_unread
from orbax_t5x.text.wording import counted, leaves_text
from orbax_t5x.transforms import Transform
from orbax_t5x.trees.subtrees import exact_patterns

_NUMBER = re.compile(r"(?<!\d)\d+(?=[/.])")
_LAYER = re.compile(r"(?P<i>\d+)[/.].*")
_CUT = re.compile(r"[/.]")
# What holds a whole model, and is no name for a tower of layers.
_ROOT = re.compile(r"(?:(?:target|params|model|module|transformer|state|base)[/.])*")
# Layers, or leaves with one dimension of another size, that have no name for layers but are as many.
_LEAST_ALIKE = 2
_NO_LAYERS = re.compile(r"(?i).*(?:expert|head)s?")
_BUILD = Fix.by_target("build the model with the checkpoint's number of layers")
_OF_LAYERS = Fix("where these are layers, ot.transforms.RepeatLayers makes other depths of them")


class _Tower(NamedTuple):
    """Layers with different numbers on the two sides.

    Attributes:
      before: the text of names before the layer's number, or the name of what holds leaves of all layers.
      old: the checkpoint's number of layers.
      new: the target's.
      is_named: whether the names say that these are layers.
      is_certain: whether layers have the same leaves on both sides, too.
      axis: of the layers in leaves that hold them all; None for layers with numbers.
    """

    before: str
    old: int
    new: int
    is_named: bool
    is_certain: bool
    axis: int | None = None

    @property
    def name(self) -> str:
        """The tower's name; empty for a model with a single tower."""
        parts = [part for part in _CUT.split(_ROOT.sub("", self.before, count=1)) if part]
        if self.axis is None or (len(parts) > 1 and (is_layer_word(parts[-1]) or parts[-1] == parts[-2])):
            parts = parts[:-1]
        return parts[-1] if parts else ""

    @property
    def in_optimizer(self) -> re.Pattern[str]:
        """Pattern of the names of the tower's leaves in the optimizer's state."""
        rest = re.escape(_ROOT.sub("", self.before, count=1))
        return re.compile(rf".*(?<![A-Za-z0-9]){rest}" + (r"(?P<i>\d+)[/.].*" if self.axis is None else ".*"))

    def has(self, name: str) -> bool:
        """Tests if a leaf belongs to a layer of a single side."""
        if self.axis is not None:
            return name.startswith(self.before) or (may_be_moment(name) and bool(self.in_optimizer.fullmatch(name)))
        match = _LAYER.fullmatch(name, len(self.before)) if name.startswith(self.before) else None
        match = match or (self.in_optimizer.fullmatch(name) if may_be_moment(name) else None)
        return match is not None and int(match["i"]) >= min(self.old, self.new)


def other_depth(unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
    """Explains numbered or counted layers, more on a side."""
    towers = [*_numbered_towers(unmatched), *_stacked_changes(unmatched)]
    groups: dict[tuple[Any, ...], list[_Tower]] = collections.defaultdict(list)
    for tower in towers:
        groups[tower[1:]].append(tower)
    for group in groups.values():
        yield from _explained(group, unmatched)
    counting = {
        name for name in unmatched.clashes if any(tower.axis is not None and tower.has(name) for tower in towers)
    }
    yield from _widths(unmatched, counting)


def _explained(towers: Sequence[_Tower], unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
    """Yields a common problem of towers that differ alike."""
    _, old, new, is_named, is_certain, axis = towers[0]
    places = unmatched.clashes if axis is not None else [*unmatched.wanted, *unmatched.leftovers]
    names = [name for name in places if any(tower.has(name) for tower in towers)]
    if not names:
        return
    named = sorted({tower.name for tower in towers if tower.name})
    owner = f"checkpoint's {' and '.join(named)}" if named else "checkpoint"
    has = "have" if len(named) > 1 else "has"
    message = f"the {owner} {has} {counted(old, 'layer')}, {new} {'is' if new == 1 else 'are'} wanted"
    if not is_named:
        shown = towers[0].before + ("i" if axis is None else "")
        message += f", if what {shown!r} holds are layers"
    ways = [_BUILD]
    if is_certain and unmatched.takes_rules:
        befores = tuple(tower.before for tower in towers)
        transform = _repeating(towers, follows=not all(name.startswith(befores) for name in names))
        ways.insert(0, Fix.adding(transform))
        message += f"; RepeatLayers makes layer i a copy of layer i * {old} // {new}"
    else:
        ways.append(_OF_LAYERS)
    kind = "shape" if axis is not None else "missing" if new > old else "leftover"
    if kind == "missing":
        patterns = exact_patterns(names, list(unmatched.target.leaves))
        ways.append(fill_new(patterns, unmatched, "if the others are new").in_words())
    elif kind == "leftover":
        ways += leave_unread(unmatched).ways
    yield Explanation(Problem(kind, None, message, Fix.any_of(*ways)), names)


def _repeating(towers: Sequence[_Tower], *, follows: bool) -> Transform:
    patterns = [re.escape(tower.before) for tower in towers]
    pattern = patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"
    axis, new = towers[0].axis, towers[0].new
    repeat = transforms.RepeatLayers(pattern + (r"(\d+)[/.].*" if axis is None else ".*"), new, axis=axis)
    return transforms.FollowOptimizer(repeat) if follows else repeat


# -- layers with numbers


def _numbered_towers(unmatched: UnmatchedLeaves) -> Iterator[_Tower]:
    stored = {name: tuple(value.shape) for name, value in unmatched.arrays.items()}
    target = {name: leaf.shape for name, leaf in unmatched.target.leaves.items() if leaf.kind not in ("keep", "none")}
    theirs, ours = _layer_shapes(stored), _layer_shapes(target)
    unexplained = {*unmatched.wanted, *unmatched.leftovers}
    for before, layers in theirs.items():
        wanted = ours.get(before, {})
        old, new = (max(found, default=-1) + 1 for found in (layers, wanted))
        if not wanted or old == new:
            continue
        more, fewer = (layers, wanted) if old > new else (wanted, layers)
        is_whole = len(layers) == old and len(wanted) == new
        shared = all(layers.get(i) == wanted.get(i) for i in fewer)
        known = [leaf for found in fewer.values() for leaf in found.items()]
        is_alike = is_whole and shared and all(leaf in known for found in more.values() for leaf in found.items())
        word = _CUT.split(before.rstrip("/._"))[-1]
        is_layer = is_layer_word(word)
        if not is_layer and (
            _NO_LAYERS.fullmatch(word) or not is_alike or min(map(len, fewer.values())) < _LEAST_ALIKE
        ):
            continue
        if not is_layer and len(fewer) < _LEAST_ALIKE:
            continue
        tower = _Tower(before, old, new, is_layer, is_layer and is_alike)
        if any(map(tower.has, unexplained)):
            yield tower


def _layer_shapes(shapes: Shapes) -> dict[str, dict[int, dict[str, tuple[int, ...]]]]:
    """Maps text before, number and text after to shapes."""
    found: dict[str, dict[int, dict[str, tuple[int, ...]]]] = {}
    for name, shape in shapes.items():
        for match in _NUMBER.finditer(name) if not may_be_moment(name) else ():
            layers = found.setdefault(name[: match.start()], {})
            layers.setdefault(int(match[0]), {})[name[match.end() :]] = shape
    return found


# -- dimensions that count layers


class _Change(NamedTuple):
    """Change of a dimension's size."""

    axis: int
    old: int
    new: int


def _changes(unmatched: UnmatchedLeaves) -> dict[str, _Change]:
    """Returns changes of leaves with a single changed dimension."""
    found: dict[str, _Change] = {}
    for name in unmatched.clashes:
        leaf, value = unmatched.target.leaves[name], unmatched.arrays.get(name)
        if value is None or leaf.kind == "key" or may_be_moment(name) or len(value.shape) != len(leaf.shape):
            continue
        sizes = [
            pair for pair in zip(range(len(leaf.shape)), value.shape, leaf.shape, strict=True) if pair[1] != pair[2]
        ]
        if len(sizes) == 1:
            found[name] = _Change(*sizes[0])
    return found


def _stacked_changes(unmatched: UnmatchedLeaves) -> Iterator[_Tower]:
    changes = _changes(unmatched)
    model = [name for name in unmatched.target.leaves if not may_be_moment(name)]
    groups: dict[_Change, list[str]] = collections.defaultdict(list)
    for name, change in changes.items():
        groups[change].append(name)
    for change, names in groups.items():
        containers = list(dict.fromkeys(stacked_part(name) or "" for name in names))
        is_certain = "" not in containers
        if not is_certain:
            containers = [_directory(names)]
        others = [
            name for name, one in changes.items() if one[1:] == change[1:] and not name.startswith(tuple(containers))
        ]
        whole = all(name in names for name in model if name.startswith(tuple(containers)))
        ranks = {len(unmatched.target.leaves[name].shape) for name in names}
        is_tower = containers != [""] and not others and whole and (is_certain or len(ranks) > 1)
        for container in containers if is_tower and len(names) >= _LEAST_ALIKE else ():
            yield _Tower(container, change.old, change.new, is_certain, is_certain, change.axis)


def _directory(names: Iterable[str]) -> str:
    """Returns the names' longest common parts, with '/'."""
    first, *others = (name.split("/")[:-1] for name in names)
    for other in others:
        first = [one for at, one in enumerate(first) if other[: at + 1] == first[: at + 1]]
    return "".join(f"{part}/" for part in first)


def _widths(unmatched: UnmatchedLeaves, explained: Collection[str]) -> Iterator[Explanation]:
    """Yields problems of leaves with a common changed dimension.

    It is the width of a model, or the number of its layers: new elements of zeros would be dead weights.
    """
    changes = {name: change for name, change in _changes(unmatched).items() if name not in explained}
    sizes = collections.Counter(change[1:] for name, change in changes.items() if not is_table(name))
    for name, change in changes.items():
        count = sizes[change[1:]]
        if count > _LEAST_ALIKE and not is_table(name):
            text = (
                f"find out what the dimension is that {leaves_text(count)} have with {change.old} in place of "
                f"{change.new}: layers, or the model's width"
            )
            fix = Fix.any_of(Fix.by_target("give the target the checkpoint's shape"), Fix(text))
            yield Explanation(dataclasses.replace(unmatched.clashes[name], fix=fix), (name,))
