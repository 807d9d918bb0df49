"""Values for placeholders, once a restore knows the target's leaf.

Placeholders get the elements at the same place of another array: `fill` follows what was done to the leaf since, as far
as that only moved elements and cast them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orbax_t5x.lazy.assemble import ConcatNode, PadNode, StackNode, concatenated, padded, stacked
from orbax_t5x.lazy.box import IndexMap, basic_index
from orbax_t5x.lazy.cast import CastNode, cast_node
from orbax_t5x.lazy.node import Node
from orbax_t5x.lazy.strided import JoinNode, SplitNode, StridedNode, reshaped, strided
from orbax_t5x.lazy.value import UnfilledLeaf
from orbax_t5x.lazy.view import KeyDataNode, KeysNode


def fill(node: Node, values: Node) -> Node:
    """Replaces the placeholders of a node by values."""
    return _fill(node, values, ())


def _fill(node: Node, values: Node, casts: tuple[CastNode, ...]) -> Node:
    """Does `fill`, and applies the casts that follow the node."""
    unfilled = [isinstance(leaf, UnfilledLeaf) for leaf in node.leaves()]
    if all(unfilled):
        return values
    if not any(unfilled):
        for cast in casts:
            node = cast_node(node, cast.dtype, cast.mismatch)
        return node
    match node:
        case KeyDataNode():
            keys = KeysNode(node.input.shape, node.input.dtype, (values,))
            return KeyDataNode(node.shape, node.dtype, (_fill(node.input, keys, casts),))
        case CastNode():
            return _fill(node.input, values, (node, *casts))
        case PadNode():
            within = strided(values, basic_index(tuple(slice(size) for size in node.input.shape), node.shape))
            return padded(_fill(node.input, within, casts), _fill(node.filler, values, casts), node.filling)
        case JoinNode() | SplitNode():
            return reshaped(_fill(node.input, reshaped(values, node.input.shape), casts), node.shape)
        case StackNode():
            parts = [strided(values, _at(node, i)) for i in range(len(node.inputs))]
            return stacked(_fill_all(node, parts, casts), node.axis)
        case ConcatNode():
            return concatenated(_fill_all(node, list(_concatenated_parts(node, values)), casts), node.axis)
        case StridedNode() if (inverse := _inverse(node)) is not None:
            return strided(_fill(node.input, strided(values, inverse), casts), node.index_map)
        case _:
            raise ValueError(node.describe_step())


def _fill_all(node: Node, parts: Sequence[Node], casts: tuple[CastNode, ...]) -> tuple[Node, ...]:
    return tuple(_fill(item, part, casts) for item, part in zip(node.inputs, parts, strict=True))


def _at(node: StackNode, index: int) -> IndexMap:
    return basic_index((*(slice(None),) * node.axis, index), node.shape)


def _concatenated_parts(node: ConcatNode, values: Node) -> Iterator[Node]:
    start = 0
    for item in node.inputs:
        stop = start + item.shape[node.axis]
        yield strided(values, basic_index((*(slice(None),) * node.axis, slice(start, stop)), node.shape))
        start = stop


def _inverse(node: StridedNode) -> IndexMap | None:
    """Inverts a node's index map, or returns None."""
    start, maps, shape = node.index_map
    axis_of = {dim: axis for axis, (dim, _) in enumerate(maps) if dim >= 0}
    back_start = [0] * len(shape)
    back: list[tuple[int, int]] = []
    for dim, size in enumerate(node.input.shape):
        axis = axis_of.get(dim)
        if axis is None and size == 1:
            back.append((-1, 0))
        elif axis is None or shape[axis] != size or maps[axis][1] not in (1, -1):
            return None
        else:
            step = maps[axis][1]
            back_start[axis] = start[dim] if step < 0 else 0
            back.append((axis, step))
    if any(dim < 0 and size != 1 for (dim, _), size in zip(maps, shape, strict=True)):
        return None
    return IndexMap(tuple(back_start), tuple(back), node.input.shape)
