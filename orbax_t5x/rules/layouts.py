"""Finds the layout of a T5's layers by marks, names, shapes.

The query kernels distinguish joined from split heads and scanned from unrolled layers; the layers' axis is the one that
fits all leaves that both sides have.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from orbax_t5x.optim.moments import find_optimizer
from orbax_t5x.optim.optimizer_names import is_step
from orbax_t5x.rules.graph import marked_layouts
from orbax_t5x.transforms.prefix import is_no_parameter
from orbax_t5x.trees.named_leaves import named_leaves, require_levels

Shape = tuple[int, ...]
Layer = tuple[str, str]
"""A tower and what a leaf is called within one of its layers."""

_MAXTEXT = re.compile(r"(?:.*/)?decoder/layers(?:_(\d+))?/(self_attention/.*|mlp/.*|.*norm/scale)")
_MAXTEXT_ALONE = re.compile(r"(?:.*/)?decoder/(?:layers/.*|layers_\d+/post_self_attention_layer_norm/scale)")
_UNROLLED = re.compile(r"(?:.*/)?(encoder|decoder)/layers_(\d+)/(.*)")
_SCANNED = re.compile(r"(?:.*/)?(encoder|decoder)/\1/(.*)")
_QUERY = re.compile(r"(?:attention|self_attention)/query/kernel")
# T5X's and MaxText's default first.
_AXES = (1, 0, 2, 3)
_BIAS = "relpos_bias/rel_embedding"
_SUBBLOCK = re.compile(r"subblock_(\d+)/(.*)")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of the layers in a tree.

    Attributes:
      kind: a layout of the table in `graph`, or "unknown".
      shapes: of one layer's leaves, or of all layers' where they are scanned.
      depths: tower -> layers, where they can be counted.
      subblocks: the number of parts that stacked layers are in; layer i is in part `i % subblocks`.
      mixed: the kinds of which the tree has names, where these are several; its kind is unknown.
    """

    kind: str
    shapes: Mapping[Layer, Shape] = dataclasses.field(default_factory=dict)
    depths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    subblocks: int = 1
    mixed: tuple[str, ...] = ()

    @property
    def is_scanned(self) -> bool:
        """True if layers are stacked on an axis."""
        return "scanned" in self.kind.split()

    @property
    def has_own_biases(self) -> bool:
        """True if a minimal T5 has biases per layer (umT5)."""
        return self.kind == "minimal" and any(rest == _BIAS for _, rest in self.shapes)

    def __str__(self) -> str:
        depths = ", ".join(f"{tower} of {depth} layers" for tower, depth in self.depths.items())
        return f"{self.kind} ({depths})" if depths else self.kind


def leaves_of(tree: Any) -> dict[str, Any]:
    """Returns leaves by name: of a checkpoint, mapping or target.

    An array that is the whole tree has the name "".

    Raises:
      TypeError: it is none of these.
    """
    leaves = getattr(tree, "leaves", None)
    require_levels(leaves if isinstance(leaves, Mapping) else tree)
    named = named_leaves(leaves if isinstance(leaves, Mapping) else tree)
    if named.get("") is tree and not hasattr(tree, "shape"):
        raise TypeError(f"leaves are given by name or as a tree, not as {type(tree).__name__}")
    return named


def parameters_of(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays that are neither the optimizer's nor the step."""
    optimizer = find_optimizer(leaves)
    states = tuple(f"{directory}/" for directory in (*optimizer.boxes, *optimizer.unclear))
    return {
        name: leaf
        for name, leaf in leaves.items()
        if not is_no_parameter(name)
        and not name.startswith(states)
        and not is_step(name)
        and hasattr(leaf, "shape")
        and hasattr(leaf, "dtype")
    }


def find_layout(leaves: Mapping[str, Any]) -> Layout:
    """Finds the layout of a tree of leaves."""
    kinds: dict[str, None] = {}
    others: dict[str, Any] = {}
    marked = marked_layouts()
    marks = _compiled(tuple(marked.values()))
    for name, leaf in leaves.items():
        found = next((kind for kind, mark in zip(marked, marks, strict=True) if mark.search(name)), None)
        if found is None:
            others[name] = leaf
        else:
            kinds[found] = None
    layers = _layout_of_layers(others)
    if layers.kind != "unknown":
        kinds[layers.kind] = None
    if len(kinds) > 1:
        return Layout("unknown", mixed=tuple(kinds))
    return layers if layers.kind in kinds else Layout(next(iter(kinds), "unknown"))


@functools.lru_cache(maxsize=16)
def _compiled(marks: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, marks))


def _layout_of_layers(leaves: Mapping[str, Any]) -> Layout:
    """Finds T5X's or MaxText's layout of a tree."""
    shapes: dict[Layer, Shape] = {}
    depths: dict[str, int] = {}
    scanned, subblocks = False, None
    maxtext = any(map(_MAXTEXT_ALONE.fullmatch, leaves))
    for name, leaf in leaves.items():
        found = _MAXTEXT.fullmatch(name) if maxtext else None
        if found is not None:
            tower, number, rest = "decoder", found[1], found[2]
        elif (found := _UNROLLED.fullmatch(name)) is not None:
            tower, number, rest = found.groups()
        elif (found := _SCANNED.fullmatch(name)) is not None:
            tower, number, rest = found[1], None, found[2]
            block = _SUBBLOCK.fullmatch(rest)
            if block is not None:
                subblocks, rest = max(subblocks or 0, int(block[1]) + 1), block[2]
        else:
            continue
        scanned |= number is None
        if number is not None:
            depths[tower] = max(depths.get(tower, 0), int(number) + 1)
        shape = getattr(leaf, "shape", None)
        if shape is not None:
            shapes.setdefault((tower, rest), tuple(shape))
    query = next((shape for (_, rest), shape in shapes.items() if _QUERY.fullmatch(rest)), None)
    if query is None:
        return Layout("unknown")
    if maxtext:
        return Layout("maxtext scanned" if scanned else "maxtext", shapes, depths)
    is_joined = len(query) == (3 if scanned else 2)
    if not scanned and any(rest.endswith("_fused/kernel") for _, rest in shapes):
        return Layout("fused", shapes, depths)
    if not scanned:
        return Layout("minimal" if is_joined else "unscanned", shapes, depths)
    kind = "scanned" + (" in subblocks" if subblocks else "") + (" with joined heads" if is_joined else "")
    return Layout(kind, shapes, depths, subblocks or 1)


def axes_between(one: Layout, other: Layout) -> dict[str, int] | None:
    """Finds the layers' axis in each stacked layout, or None.

    Taken out of every leaf they give the other side's (heads joined or not), and their sizes are the depths.
    """
    if one.is_scanned and other.is_scanned:
        return _axes_of_both(one, other)
    if not one.is_scanned and not other.is_scanned:
        return {}
    scanned, unrolled = (one, other) if one.is_scanned else (other, one)
    fitting = stacked_depths(scanned, unrolled).items()
    axis = next((axis for axis, depths in fitting if depths.items() <= unrolled.depths.items()), None)
    return None if axis is None else {scanned.kind: axis}


def _axes_of_both(one: Layout, other: Layout) -> dict[str, int] | None:
    for axis in _AXES:
        unrolled = _unrolled(one, axis)
        if unrolled is None:
            continue
        fitting = stacked_depths(other, unrolled).items()
        found = next((axis for axis, depths in fitting if depths.items() <= unrolled.depths.items()), None)
        if found is not None:
            return {one.kind: axis, other.kind: found}
    return None


def _unrolled(scanned: Layout, axis: int) -> Layout | None:
    """Takes the layers' axis out of all shapes."""
    if any(len(shape) <= axis for shape in scanned.shapes.values()):
        return None
    sizes = {(tower, shape[axis] * scanned.subblocks) for (tower, _), shape in scanned.shapes.items()}
    shapes = {layer: _without_axis(shape, axis) for layer, shape in scanned.shapes.items()}
    return Layout("", shapes, dict(sizes)) if len(sizes) == len(dict(sizes)) else None


def stacked_depths(scanned: Layout, unrolled: Layout) -> dict[int, dict[str, int]]:
    """Finds axes that fit all leaves, with the towers' depths."""
    common = scanned.shapes.keys() & unrolled.shapes.keys()
    found: dict[int, dict[str, int]] = {}
    for axis in _AXES:
        fits = bool(common) and all(
            axis < len(scanned.shapes[layer])
            and _same_but_heads(_without_axis(scanned.shapes[layer], axis), unrolled.shapes[layer])
            for layer in common
        )
        sizes = {(tower, scanned.shapes[tower, rest][axis] * scanned.subblocks) for tower, rest in common if fits}
        if fits and len(sizes) == len(dict(sizes)):
            found[axis] = dict(sizes)
    return found


def _without_axis(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _same_but_heads(one: Shape, other: Shape) -> bool:
    """Tests if shapes are equal but for joined heads."""
    if one == other:
        return True
    split, shape = sorted((one, other), key=len, reverse=True)
    if len(split) != 3 or len(shape) != 2:
        return False
    first, second, third = split
    return shape in ((first, second * third), (first * second, third))


def heads_of(split: Layout, axis: int | None) -> tuple[int, int] | None:
    """Returns the number and size of split heads."""
    for (_, rest), shape in split.shapes.items():
        if _QUERY.fullmatch(rest):
            one = shape if axis is None else _without_axis(shape, axis)
            return (one[1], one[2]) if len(one) == 3 else None
    return None
