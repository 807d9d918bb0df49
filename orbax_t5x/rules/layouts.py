"""Finds the layout of a T5 model's layers in a tree, by names and shapes.

The query kernels distinguish joined from split heads and scanned from unrolled layers; the layers' axis is the one that
fits all leaves that both sides have.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

Shape = tuple[int, ...]
Layer = tuple[str, str]
"""A tower and what a leaf is called within one of its layers."""

_HUGGING_FACE = re.compile(r"(?:.*[./])?(?:encoder|decoder)\.block\.\d+\.layer\..*")
_HUGGING_FACE_FLAX = re.compile(r"(?:.*/)?(?:encoder|decoder)/block/\d+/layer/.*")
_GGUF = re.compile(r"(?:enc|dec)\.blk\.\d+\..*")
_MESH_TF = re.compile(r"(?:encoder|decoder|transformer)/block_\d+/.*")
_MAXTEXT = re.compile(r"(?:.*/)?decoder/layers(?:_(\d+))?/(self_attention/.*|mlp/.*|.*norm/scale)")
_MAXTEXT_ALONE = re.compile(r"(?:.*/)?decoder/(?:layers/.*|layers_\d+/post_self_attention_layer_norm/scale)")
_UNROLLED = re.compile(r"(?:.*/)?(encoder|decoder)/layers_(\d+)/(.*)")
_SCANNED = re.compile(r"(?:.*/)?(encoder|decoder)/\1/(.*)")
_QUERY = re.compile(r"(?:attention|self_attention)/query/kernel")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of the layers in a tree.

    Attributes:
      kind: "minimal", "unscanned", "scanned", "maxtext", "maxtext scanned", "hugging face", "hugging face
        flax", "gguf", "mesh tf" or "unknown".
      shapes: of one layer's leaves, or of all layers' where they are scanned.
      depths: tower -> layers, where they can be counted.
    """

    kind: str
    shapes: Mapping[Layer, Shape] = dataclasses.field(default_factory=dict)
    depths: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def is_scanned(self) -> bool:
        """True if layers are stacked on an axis."""
        return self.kind in ("scanned", "maxtext scanned")

    def __str__(self) -> str:
        depths = ", ".join(f"{tower} of {depth} layers" for tower, depth in self.depths.items())
        return f"{self.kind} ({depths})" if depths else self.kind


def layout_of(leaves: Mapping[str, Any]) -> Layout:
    """Finds the layout of a tree of leaves."""
    if any(map(_HUGGING_FACE.fullmatch, leaves)):
        return Layout("hugging face")
    if any(map(_HUGGING_FACE_FLAX.fullmatch, leaves)):
        return Layout("hugging face flax")
    if any(map(_GGUF.fullmatch, leaves)):
        return Layout("gguf")
    if any(map(_MESH_TF.fullmatch, leaves)):
        return Layout("mesh tf")
    shapes: dict[Layer, Shape] = {}
    depths: dict[str, int] = {}
    scanned = False
    maxtext = any(map(_MAXTEXT_ALONE.fullmatch, leaves))
    for name, leaf in leaves.items():
        found = _MAXTEXT.fullmatch(name) if maxtext else None
        if found is not None:
            tower, number, rest = "decoder", found[1], found[2]
        elif (found := _UNROLLED.fullmatch(name)) is not None:
            tower, number, rest = found.groups()
        elif (found := _SCANNED.fullmatch(name)) is not None:
            tower, number, rest = found[1], None, found[2]
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
    kind = "scanned" if scanned else "minimal" if len(query) == 2 else "unscanned"
    return Layout(kind, shapes, depths)


def scan_axis(scanned: Layout, unrolled: Layout) -> int | None:
    """Finds the axis that, taken out of every leaf, gives the other side's (heads joined or not), with a size that is
    the depth.
    """
    # T5X's and MaxText's default comes first where several axes fit.
    fitting = stacked_depths(scanned, unrolled).items()
    return next((axis for axis, depths in fitting if depths.items() <= unrolled.depths.items()), None)


def stacked_depths(scanned: Layout, unrolled: Layout) -> dict[int, dict[str, int]]:
    """Finds the axes that, taken out of every leaf, give the other side's, and the depths of the towers there."""
    common = scanned.shapes.keys() & unrolled.shapes.keys()
    found: dict[int, dict[str, int]] = {}
    for axis in (1, 0, 2, 3):
        fits = bool(common) and all(
            axis < len(scanned.shapes[layer])
            and _same_but_heads(_without(scanned.shapes[layer], axis), unrolled.shapes[layer])
            for layer in common
        )
        sizes = {(tower, scanned.shapes[tower, rest][axis]) for tower, rest in common} if fits else set[Any]()
        if fits and len(sizes) == len(dict(sizes)):
            found[axis] = dict(sizes)
    return found


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _same_but_heads(split: Shape, shape: Shape) -> bool:
    """Reports whether shapes are equal, or would be after joining (E, H, D) or (H, D, E)."""
    if split == shape:
        return True
    if len(split) != 3 or len(shape) != 2:
        return False
    first, second, third = split
    return shape in ((first, second * third), (first * second, third))


def heads_of(split: Layout, axis: int | None) -> tuple[int, int] | None:
    """Returns the number of heads and their size; None where they are joined.

    Args:
      split: the layout.
      axis: of the layers; None where they are not stacked.
    """
    for (_, rest), shape in split.shapes.items():
        if _QUERY.fullmatch(rest):
            one = shape if axis is None else _without(shape, axis)
            return (one[1], one[2]) if len(one) == 3 else None
    return None
