"""Repeated layers in a row: `encoder/layers_{0…23}/mlp/wi_0/kernel`.

Rows of parallel texts (a target's name, where it comes from, how) fold where the first texts differ in one number,
everything that the caller calls alike is alike, and the other texts follow: what varies there is written in the same
order, so a row never claims an order that is not there: `{0…23}`, `{0…22:2}` (every second), `{23…0}`, `{1…3,0}`. What
would need more than a few such runs stays unfolded. A second number folds too when it takes at least three values
(experts in layers), so that `wi_0` and `wi_1` stay two rows. Linear in the number of rows. A tree is that of the folded
names, in which a chain of single branches is one row.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from orbax_t5x.text.table import INDENT, TableRow
from orbax_t5x.text.wording import plain, size_text

_NUMBER = re.compile(r"([0-9]+)")
# More runs than this in one pair of braces are harder to read than the rows themselves.
_MOST_RUNS = 4
# Values that a number must take to fold: the first one, and any further one.
_LEAST_FIRST = 2
_LEAST_FURTHER = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Folded:
    """Row for several similar rows.

    Numbers that vary are in braces, and `members` are in the order of these.
    """

    texts: tuple[str, ...]
    members: tuple[int, ...]

    @property
    def label(self) -> str:
        """The leading text, with the number of several folded rows."""
        return self.texts[0] + times_text(len(self.members))


def times_text(count: int) -> str:
    """Returns a multiplication sign and the count, empty for 1."""
    return f" ×{count}" if count > 1 else ""


@dataclasses.dataclass(slots=True)
class _Item:
    """A row while it is being folded.

    Each text is split into (text, number, text, …), so odd places are numbers.
    """

    tokens: list[list[str]]
    members: list[int]
    alike: Hashable


def fold(rows: Sequence[tuple[str, ...]], alike: Sequence[Hashable] | None = None) -> list[Folded]:
    """Folds parallel rows, each in the place of its first member."""
    items = [
        _Item([_NUMBER.split(text) for text in row], [index], None if alike is None else alike[index])
        for index, row in enumerate(rows)
    ]
    least = _LEAST_FIRST
    while True:
        folded = _fold_once(items, least)
        if len(folded) == len(items):
            break
        items, least = folded, _LEAST_FURTHER
    items.sort(key=lambda item: min(item.members))
    return [Folded(tuple("".join(tokens) for tokens in item.tokens), tuple(item.members)) for item in items]


def fold_names(names: Iterable[str]) -> list[Folded]:
    """Folds names without further texts."""
    return fold([(name,) for name in names])


def runs(numbers: Sequence[str]) -> str | None:
    """Writes numbers as runs of equal steps, in braces."""
    if len(set(numbers)) == 1:
        return numbers[0]
    values = [int(number) for number in numbers]
    parts: list[str] = []
    start = 0
    while start < len(values):
        if len(parts) == _MOST_RUNS:
            return None
        stop = start + 1
        step = values[stop] - values[start] if stop < len(values) else 0
        while step and stop < len(values) and _follows(numbers, values, stop, step):
            stop += 1
        if stop - start < 3 or step == 0:
            parts.append(numbers[start])
            start += 1
            continue
        # Not `0,2…22`: beside other numbers it would be ambiguous.
        parts.append(f"{numbers[start]}…{numbers[stop - 1]}" + (f":{abs(step)}" if abs(step) != 1 else ""))
        start = stop
    return "{" + ",".join(parts) + "}"


def _follows(numbers: Sequence[str], values: Sequence[int], at: int, step: int) -> bool:
    """Tests if a number continues a run, padded with zeros alike."""
    if values[at] - values[at - 1] != step:
        return False
    before, number = numbers[at - 1], numbers[at]
    if len(before) == len(number):
        return True
    return all(len(one) == 1 or one[0] != "0" for one in (before, number))


def _fold_once(items: list[_Item], least: int) -> list[_Item]:
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        template = tuple((len(tokens), *tokens[::2]) for tokens in item.tokens)
        groups.setdefault((item.alike, template), []).append(item)
    result: list[_Item] = []
    for group in groups.values():
        result.extend(_fold_group(group, least) if len(group) >= least else group)
    return result


def _fold_group(group: list[_Item], least: int) -> list[_Item]:
    """Folds rows of a template along the number of the layer."""
    places = range(1, len(group[0].tokens[0]), 2)
    place = next((one for one in places if len({item.tokens[0][one] for item in group}) >= least), None)
    if place is None:
        return group
    buckets: dict[Hashable, list[_Item]] = {}
    for item in group:
        lead = item.tokens[0]
        buckets.setdefault((*lead[1:place:2], None, *lead[place + 2 :: 2]), []).append(item)
    result: list[_Item] = []
    for bucket in buckets.values():
        merged = _merge(sorted(bucket, key=lambda item: (int(item.tokens[0][place]), item.tokens[0][place])), place)
        result.extend(bucket if merged is None or len(bucket) < least else [merged])
    return result


def _merge(bucket: list[_Item], place: int) -> _Item | None:
    """Merges a bucket into a row, or returns None."""
    first = bucket[0]
    merged: list[list[str]] = []
    for text, tokens in enumerate(first.tokens):
        joined: list[str] = []
        for position, token in enumerate(tokens):
            if position % 2 == 0:
                joined.append(token)
                continue
            numbers = [item.tokens[text][position] for item in bucket]
            order = runs(numbers)
            if order is None or (text == 0 and position == place and len(set(numbers)) != len(numbers)):
                return None
            joined.append(order)
        merged.append(_rejoined(joined))
    return _Item(merged, [member for item in bucket for member in item.members], first.alike)


def _rejoined(tokens: list[str]) -> list[str]:
    """Tokens with the numbers that became braces counted as text."""
    result = [tokens[0]]
    for number, text in zip(tokens[1::2], tokens[2::2], strict=True):
        if number.isdigit():
            result += [number, text]
        else:
            result[-1] += number + text
    return result


@dataclasses.dataclass(frozen=True, slots=True)
class TreeLeaf:
    """Leaf of a tree: its text and its bytes.

    The text is its array, or something else in its place.
    """

    array: str
    size: int


@dataclasses.dataclass(slots=True)
class _Branch:
    """A part of a name.

    It may be a leaf and have parts below at once, as TensorFlow's names do.
    """

    leaf: TreeLeaf | None = None
    size: int = 0
    parts: dict[str, _Branch] = dataclasses.field(default_factory=lambda: dict[str, "_Branch"]())

    def add(self, names: Sequence[str], leaf: TreeLeaf) -> None:
        """Puts a leaf below."""
        branch = self
        for name in names:
            branch.size += leaf.size
            branch = branch.parts.setdefault(name, _Branch())
        branch.leaf = leaf

    def rows(self) -> Iterator[TableRow]:
        """Returns rows of names with their indent, of any depth."""
        pending = [iter(self.parts.items())]
        while pending:
            for name, branch in pending[-1]:
                while branch.leaf is None and len(branch.parts) == 1:
                    ((below, branch),) = branch.parts.items()
                    name = f"{name}/{below}"
                label = INDENT * (len(pending) - 1) + plain(name)
                if branch.leaf is not None:
                    array = branch.leaf.array
                    yield TableRow(label, array, size=size_text(branch.leaf.size) if "[" in array else "")
                if branch.parts:
                    yield TableRow(f"{label}/", size=size_text(branch.size) if branch.size else "")
                    pending.append(iter(branch.parts.items()))
                    break
            else:
                pending.pop()


def tree_rows(leaves: Mapping[str, TreeLeaf], *, folded: bool = True) -> list[TableRow]:
    """Returns the rows of a tree of leaves."""
    root = _Branch()
    if not folded:
        for name, leaf in leaves.items():
            root.add(name.split("/"), leaf)
        return list(root.rows())
    every = list(leaves.values())
    for row in fold([(name,) for name in leaves], [leaf.array for leaf in every]):
        first = every[row.members[0]]
        size = sum(every[member].size for member in row.members)
        root.add(row.texts[0].split("/"), TreeLeaf(first.array + times_text(len(row.members)), size))
    return list(root.rows())


def empty_text(value: Any) -> str:
    """Returns the text for a node without leaves."""
    if value is ...:
        return "... (nothing was saved)"
    return "None" if value is None else f"empty {type(value).__name__}"
