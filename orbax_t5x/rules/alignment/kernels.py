"""Kernels of convolutions, in the other side's order of dimensions.

PyTorch keeps outputs and inputs first, JAX last; the dimensions of the window keep their order.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

from orbax_t5x.rules.alignment.layers import NamedLeaf, Shape
from orbax_t5x.rules.alignment.words import is_of_attention


def with_kernels(sides: Sequence[Sequence[NamedLeaf]]) -> list[list[NamedLeaf]]:
    """Returns the source's kernels in the target's order, if some show it."""
    ours, theirs = ([leaf for leaf in leaves if _is_kernel(leaf)] for leaves in sides)
    counts = [collections.Counter(leaf.shape for leaf in kernels) for kernels in (ours, theirs)]
    wanted = counts[1].keys()
    shown = {
        is_last: [leaf for leaf in ours if _shows(leaf.shape, wanted, is_last=is_last)] for is_last in (True, False)
    }
    # With a window of one dimension both orders are one.
    orders = [is_last for is_last, leaves in shown.items() if any(len(leaf.shape) > 3 for leaf in leaves)] or [True]
    is_last = orders[0]
    if counts[0] == counts[1] or len(orders) > 1 or not shown[is_last]:
        return [list(leaves) for leaves in sides]
    names = {leaf.path[-1] for leaf in shown[is_last]}
    has_transposed = any(_shows(leaf.shape, wanted, is_last=is_last, is_transposed=True) for leaf in ours)

    def ordered(leaf: NamedLeaf) -> NamedLeaf:
        if not _is_kernel(leaf):
            return leaf
        axes = _axes(len(leaf.shape), is_last=is_last)
        shape = _shape(leaf.shape, axes)
        is_sure = _is_clear(leaf.shape, is_last=is_last) or (leaf.path[-1] in names and not has_transposed)
        return leaf._replace(shape=shape, order=axes) if shape in wanted and is_sure else leaf

    return [list(map(ordered, sides[0])), list(sides[1])]


def _is_kernel(leaf: NamedLeaf) -> bool:
    return len(leaf.shape) > 2 and not is_of_attention(leaf.path)


def _axes(rank: int, *, is_last: bool, is_transposed: bool = False) -> tuple[int, ...]:
    """Returns the order with outputs and inputs last, or first.

    Kernels of transposed convolutions have inputs before outputs in PyTorch.
    """
    if is_last:
        return (*range(2, rank), *((0, 1) if is_transposed else (1, 0)))
    return (*((rank - 2, rank - 1) if is_transposed else (rank - 1, rank - 2)), *range(rank - 2))


def _shape(shape: Shape, axes: Sequence[int]) -> Shape:
    return tuple(shape[axis] for axis in axes)


def _is_clear(shape: Shape, *, is_last: bool) -> bool:
    """Tests that sizes tell outputs from inputs."""
    if len(shape) == 3:
        return len(set(shape)) == 3
    return shape[0] != shape[1] if is_last else shape[-1] != shape[-2]


def _shows(shape: Shape, wanted: Collection[Shape], *, is_last: bool, is_transposed: bool = False) -> bool:
    """Tests that an array fits the other side in this order alone."""
    axes, other = (_axes(len(shape), is_last=is_last, is_transposed=one) for one in (is_transposed, not is_transposed))
    return (
        _is_clear(shape, is_last=is_last)
        and shape not in wanted
        and _shape(shape, axes) in wanted
        and _shape(shape, other) not in wanted
    )
