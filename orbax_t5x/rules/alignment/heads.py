"""Heads of attentions, as dimensions of their own or in matrices.

Projects keep such a matrix as `[width, heads, size]`, `[heads, width, size]`, `[heads, size, width]` or flat, always
with a head's entries in a row. The width is the layer's most frequent size.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from orbax_t5x.rules.alignment.layers import NamedLeaf, Shape
from orbax_t5x.rules.alignment.words import Path, is_of_attention


class LayoutSteps(NamedTuple):
    """Steps from an array to another with the same entries.

    Attributes:
      shapes: of both arrays; empty where equal but for the order of dimensions.
      atoms: the shape in which dimensions change their order; empty without heads.
      axes: the first array's dimension for each of the second's; empty where the order is kept.
    """

    shapes: tuple[Shape, ...]
    atoms: Shape
    axes: tuple[int, ...]


def with_matrices(sides: Sequence[Sequence[NamedLeaf]]) -> list[list[NamedLeaf]]:
    """Returns heads as matrices where two sides have unlike heads."""
    shapes = {leaf.full for leaves in sides for _, leaf in _heads_of(leaves, frozenset())}
    every = [dict(_heads_of(leaves, shapes)) for leaves in sides]
    counts = [collections.Counter(leaf.full for leaf in found.values() if len(leaf.full) > 2) for found in every]
    if counts[0] == counts[1]:
        return [list(leaves) for leaves in sides]
    return [
        [found.get((leaf.name, leaf.layer), leaf) for leaf in leaves]
        for leaves, found in zip(sides, every, strict=True)
    ]


def _heads_of(
    leaves: Iterable[NamedLeaf], shapes: Collection[Shape]
) -> Iterator[tuple[tuple[str, int | None], NamedLeaf]]:
    """Yields arrays with heads as matrices and vectors.

    Attentions have them; without known words the shape decides.
    """
    layers: dict[Path, list[NamedLeaf]] = {}
    for leaf in leaves:
        at = next((at for at, key in enumerate(leaf.path) if isinstance(key, int)), None)
        if at is not None:
            layers.setdefault(leaf.path[: at + 1], []).append(leaf)
    for its in layers.values():
        width = _width(its)
        found = [one for leaf in its if (one := _as_matrix(leaf, width, shapes)) is not None]
        has_both = len({leaf.width == len(leaf.full) - 1 for leaf in found}) == 2
        # A square matrix lies as others do, if inputs and outputs lie as in one convention.
        found = [leaf for leaf in found if has_both or leaf.shape[0] != leaf.shape[1]]
        heads = {heads_of(leaf) for leaf in found}
        biases = [leaf for leaf in its if len(leaf.shape) == 2 and leaf.shape in heads and is_of_attention(leaf.path)]
        found += [leaf._replace(shape=(math.prod(leaf.shape),), full=leaf.shape) for leaf in biases]
        yield from (((leaf.name, leaf.layer), leaf) for leaf in found)


def _width(leaves: Iterable[NamedLeaf]) -> int | None:
    """Returns the size that most leaves have, if a single one."""
    counts = collections.Counter(size for leaf in leaves for size in set(leaf.shape) if size > 1)
    most = [size for size, count in counts.items() if count == max(counts.values())]
    return most[0] if len(most) == 1 else None


def _as_matrix(leaf: NamedLeaf, width: int | None, shapes: Collection[Shape]) -> NamedLeaf | None:
    is_known = is_of_attention(leaf.path)
    if is_known is None:
        is_known = leaf.shape in shapes
    if len(leaf.shape) != 3 or width is None or leaf.shape.count(width) != 1 or not is_known:
        return None
    at, other = leaf.shape.index(width), math.prod(leaf.shape) // width
    return leaf._replace(shape=(other, width) if at == 2 else (width, other), full=leaf.shape, width=at)


def heads_of(leaf: NamedLeaf) -> Shape:
    """Returns the number of heads and their size, or nothing."""
    return tuple(size for at, size in enumerate(leaf.full) if at != leaf.width)


def change(old: NamedLeaf, new: NamedLeaf, is_turned: bool, count: int = 0) -> LayoutSteps:
    """Returns the steps between arrays, `count` layers included.

    Layers count where both arrays have them on an axis.
    """
    sizes, groups = _dimensions(old, new, is_turned)
    if old.axis is not None and new.axis is not None:
        sizes["layers"] = count
        for its, axis in zip(groups, (old.axis, new.axis), strict=True):
            its.insert(axis, ["layers"])
    first, second = ([label for group in its for label in group] for its in groups)
    axes = tuple(map(first.index, second))
    shapes = tuple(tuple(math.prod(sizes[label] for label in group) for group in its) for its in groups)
    atoms = tuple(sizes[label] for label in first)
    if axes == tuple(range(len(axes))):
        return LayoutSteps(() if shapes[0] == shapes[1] else shapes, (), ())
    is_whole = (atoms, tuple(atoms[at] for at in axes)) == shapes
    return LayoutSteps(*((), ()) if is_whole else (shapes, atoms), axes)


def _dimensions(old: NamedLeaf, new: NamedLeaf, is_turned: bool) -> tuple[dict[str, int], list[list[list[str]]]]:
    """Returns sizes by labels, and the labels of each array's dimensions."""
    known = new if len(new.full) == 3 else old if len(old.full) == 3 else None
    if known is not None:
        width = math.prod(known.shape) // math.prod(heads_of(known))
        sizes: dict[str, int] = dict(zip(("width", "heads", "size"), (width, *heads_of(known)), strict=True))
        groups: list[list[list[str]]] = []
        for leaf in (old, new):
            is_last = leaf.width == 2 if leaf.full else (known.width == 2) != is_turned
            its = [["heads"], ["size"]] if leaf.full else [["heads", "size"]]
            its.insert(len(its) if is_last else leaf.width or 0, ["width"])
            groups.append(its)
        return sizes, groups
    if old.full or new.full:
        sizes: dict[str, int] = dict(zip(("heads", "size"), old.full or new.full, strict=True))
        return sizes, [[["heads"], ["size"]] if leaf.full else [["heads", "size"]] for leaf in (old, new)]
    # Dimensions of 1 are left out but for kernels, which have them in both arrays.
    sizes = {str(at): size for at, size in enumerate(size for size in old.shape if size != 1 or old.order)}
    groups = []
    for leaf in (old, new):
        labels = iter(reversed(sizes) if is_turned and leaf is new else sizes)
        groups.append([[next(labels)] if size != 1 or old.order else [] for size in leaf.shape])
    if old.order:
        groups[0] = [groups[0][old.order.index(at)] for at in range(len(old.order))]
    return sizes, groups
