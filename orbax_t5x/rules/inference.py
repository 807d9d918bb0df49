"""Which rule pack leads from one tree to another, told from names and shapes.

Looks at the query kernels first (joined or split heads, scanned or not), then finds the layers' axis as the one
that fits all leaves that both sides have. Nothing is read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from orbax_t5x.errors import Problem, RestorePlanError
from orbax_t5x.rules.hugging_face import hf_flax_t5_to_t5x, hf_t5_to_t5x
from orbax_t5x.rules.maxtext import t5x_decoder_to_maxtext
from orbax_t5x.rules.pack import RulePack
from orbax_t5x.rules.steps import WithoutTarget
from orbax_t5x.rules.t5x import t5_minimal_to_scanned, t5_minimal_to_unscanned, t5_unscanned_to_scanned
from orbax_t5x.transforms import translate
from orbax_t5x.transforms.chain import Chain
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.follow.trace import symbol_for
from orbax_t5x.trees.flat import flatten

Shape = tuple[int, ...]
Layer = tuple[str, str]
"""A tower and what a leaf is called within one of its layers."""

_OPTIMIZER = re.compile(r"(?:[^/]+/)?(?:state|opt_state)/.*")
_HUGGING_FACE = re.compile(r"(?:encoder|decoder)\.block\.\d+\.layer\..*")
_HUGGING_FACE_FLAX = re.compile(r"(?:encoder|decoder)/block/\d+/layer/.*")
_MESH_TF = re.compile(r"(?:encoder|decoder|transformer)/block_\d+/.*")
_MAXTEXT = re.compile(r"params/params/decoder/layers(?:_(\d+))?/(self_attention/.*|mlp/.*|.*norm/scale)")
_UNROLLED = re.compile(r"(?:.*/)?(encoder|decoder)/layers_(\d+)/(.*)")
_SCANNED = re.compile(r"(?:.*/)?(encoder|decoder)/\1/(.*)")
_QUERY = re.compile(r"(?:attention|self_attention)/query/kernel")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tree keeps its layers.

    Attributes:
      kind: "minimal", "unscanned", "scanned", "maxtext", "maxtext scanned", "hugging face", "hugging face
        flax", "mesh tf" or "unknown".
      shapes: of one layer's leaves, or of all layers' where they are scanned.
      depths: tower -> layers, where they can be counted.
    """

    kind: str
    shapes: Mapping[Layer, Shape] = dataclasses.field(default_factory=dict)
    depths: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def is_scanned(self) -> bool:
        """Whether layers are stacked on an axis."""
        return self.kind in ("scanned", "maxtext scanned")

    def __str__(self) -> str:
        depths = ", ".join(f"{tower} of {depth} layers" for tower, depth in self.depths.items())
        return f"{self.kind} ({depths})" if depths else self.kind


def _leaves(tree: Any) -> dict[str, Any]:
    """Leaves by name: of a checkpoint, a mapping from names, a nested state dict, or anything with `state_dict()`."""
    if not isinstance(tree, Mapping):
        tree = getattr(tree, "leaves", tree)
    if not isinstance(tree, Mapping) and hasattr(tree, "state_dict"):
        tree = tree.state_dict()
    if not isinstance(tree, Mapping):
        raise TypeError(f"infer takes leaves by name or nested state dicts, not {type(tree).__name__}")
    return {name: leaf for name, leaf in flatten(tree).items() if not _OPTIMIZER.fullmatch(name)}


def layout_of(leaves: Mapping[str, Any]) -> Layout:
    """The layout of a tree of leaves."""
    if any(map(_HUGGING_FACE.fullmatch, leaves)):
        return Layout("hugging face")
    if any(map(_HUGGING_FACE_FLAX.fullmatch, leaves)):
        return Layout("hugging face flax")
    if any(map(_MESH_TF.fullmatch, leaves)):
        return Layout("mesh tf")
    shapes: dict[Layer, Shape] = {}
    depths: dict[str, int] = {}
    scanned = maxtext = False
    for name, leaf in leaves.items():
        found = _MAXTEXT.fullmatch(name)
        if found is not None:
            maxtext, tower, number, rest = True, "decoder", found[1], found[2]
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


def _scan_axis(scanned: Layout, unrolled: Layout) -> int | None:
    """The axis that, taken out of every leaf, gives the other side's (heads joined or not), with a size that is the
    depth.
    """

    def fits(axis: int) -> bool:
        common = scanned.shapes.keys() & unrolled.shapes.keys()
        return bool(common) and all(
            axis < len(scanned.shapes[layer])
            and scanned.shapes[layer][axis] == unrolled.depths.get(layer[0])
            and _same_but_heads(_without(scanned.shapes[layer], axis), unrolled.shapes[layer])
            for layer in common
        )

    # T5X's and MaxText's default comes first where several axes fit.
    return next((axis for axis in (1, 0, 2, 3) if fits(axis)), None)


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _same_but_heads(split: Shape, shape: Shape) -> bool:
    """Whether shapes are equal, or would be after joining (E, H, D) or (H, D, E)."""
    if split == shape:
        return True
    if len(split) != 3 or len(shape) != 2:
        return False
    first, second, third = split
    return shape in ((first, second * third), (first * second, third))


def _heads(split: Layout, axis: int | None) -> tuple[int, int] | None:
    for (_, rest), shape in split.shapes.items():
        if _QUERY.fullmatch(rest):
            one = shape if axis is None else _without(shape, axis)
            return (one[1], one[2]) if len(one) == 3 else None
    return None


def _between(source: Layout, target: Layout) -> RulePack | None:
    """The pack from one T5X layout to another, or to MaxText's; None if there is none."""
    if source.kind == target.kind:
        return RulePack((), (), "nothing to map")
    for one, other, turn in ((source, target, False), (target, source, True)):
        pack = _forwards(one, other)
        if pack is not None:
            return pack.inverse() if turn else pack
    return None


def _forwards(source: Layout, target: Layout) -> RulePack | None:
    axis = _scan_axis(target, source) if target.is_scanned else None
    if target.is_scanned and axis is None:
        return None
    if (source.kind, target.kind) == ("unscanned", "scanned") and axis is not None:
        return t5_unscanned_to_scanned(scan_axis=axis)
    heads = _heads(target, axis)
    if source.kind != "minimal" or heads is None:
        return None
    if target.kind == "unscanned":
        return t5_minimal_to_unscanned(*heads)
    if target.kind == "scanned" and axis is not None:
        return t5_minimal_to_scanned(*heads, scan_axis=axis)
    if target.kind in ("maxtext", "maxtext scanned"):
        return t5x_decoder_to_maxtext(*heads, scanned=target.is_scanned, scan_axis=1 if axis is None else axis)
    return None


def _then(first: RulePack, second: RulePack) -> RulePack:
    if not second.steps:
        return first
    return RulePack(
        (*first.steps, *second.steps),
        (*second.back, *first.back),
        f"{first.name} then {second.name}",
        first.example,
        second.back_example or first.back_example,
    )


def mesh_tf_to_t5x() -> RulePack:
    """Mesh TensorFlow's T5 names to T5X minimal T5, parameters and Adafactor slots: `Translate()`, without the way
    back.
    """
    return RulePack((translate.Translate(),), (), "mesh_tf_to_t5x()", "encoder/block_000/layer_000/SelfAttention/q")


# Layouts that are no T5X's, and the pack from each to T5X's minimal T5.
_TO_MINIMAL = {"hugging face": hf_t5_to_t5x, "hugging face flax": hf_flax_t5_to_t5x, "mesh tf": mesh_tf_to_t5x}


def infer(source_leaves: Any, target_leaves: Any) -> RulePack:
    """The rule pack that maps a checkpoint's leaves to a target's.

    Args:
      source_leaves: an opened checkpoint, its `leaves`, or a nested state dict.
      target_leaves: leaves by name, a nested state dict, or a train state.

    Returns:
      A transform. `print(pack.name)` tells what it is, `pack.found` what was seen. It has no steps where both sides
      have one layout.

    Raises:
      RestorePlanError: no pack leads from one to the other; the text says what both look like.
    """
    source, target = _leaves(source_leaves), _leaves(target_leaves)
    seen, wanted = layout_of(source), layout_of(target)
    pack = _infer(source, target, seen, wanted)
    if pack is None:
        message = f"no rule pack leads from {_described(seen, source)} to {_described(wanted, target)}"
        if "unknown" not in (seen.kind, wanted.kind):
            message += ": no leaf's shape, or not the same depth, fits on both sides"
        fix = "write AssignmentMap, Rename or StackLayers rules by hand"
        raise RestorePlanError([Problem("rule", None, message, fix)])
    return dataclasses.replace(pack, found=f"from {seen} to {wanted}: {pack.name}")


def _described(layout: Layout, leaves: Mapping[str, Any]) -> str:
    if layout.kind in _TO_MINIMAL:
        pack = _TO_MINIMAL[layout.kind]()
        return f"{layout.kind} ({_after(pack, leaves)})"
    return str(layout) if layout.kind != "unknown" else f"unknown names (such as {sorted(leaves)[:2]})"


def _infer(source: Mapping[str, Any], target: Mapping[str, Any], seen: Layout, wanted: Layout) -> RulePack | None:
    if seen.kind == wanted.kind and seen.kind in _TO_MINIMAL:
        return RulePack((), (), "nothing to map")
    if wanted.kind in ("hugging face", "hugging face flax"):
        pack = _infer(target, source, wanted, seen)
        return None if pack is None else pack.inverse()
    if seen.kind not in _TO_MINIMAL:
        return _between(seen, wanted) if "unknown" not in (seen.kind, wanted.kind) else None
    first = _TO_MINIMAL[seen.kind]()
    second = _between(_after(first, source), wanted)
    if second is None:
        return None
    if second.steps and seen.kind == "mesh tf":
        # The target has the names of the second step; the first decides as if there were none.
        first = dataclasses.replace(first, steps=(WithoutTarget(Chain(first.steps)),))
    return _then(first, second)


def _after(pack: RulePack, source: Mapping[str, Any]) -> Layout:
    """The layout that a pack makes of a source; on symbols, so nothing can be read."""
    symbols = {name: symbol for name, leaf in source.items() if (symbol := symbol_for(name, leaf)) is not None}
    return layout_of(pack.apply(symbols, {}, Diagnostics()))
