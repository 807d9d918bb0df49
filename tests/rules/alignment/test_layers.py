"""Layers: numbered modules that are alike, chains, and leaves with an axis or blocks of them."""

import pytest

from orbax_t5x.rules.alignment.kinds import Sides
from tests.support.aligned_leaves import items


def templates(ours, theirs=None):
    tree = Sides(items(ours), items(ours if theirs is None else theirs)).source
    return {"/".join(kind.template): len(kind.members) for kind in tree.kinds}


def test_a_chain_of_matrices_has_an_order_but_inside_a_layer():
    chain = {f"mlp/{i}/w": shape for i, shape in enumerate([(2, 3), (3, 3), (3, 5)])}
    assert templates(chain) == {"mlp/#/w": 1} | {"mlp/#/w": 1}
    inside = {f"h/{layer}/{name}": shape for layer in range(2) for name, shape in chain.items()}
    assert "h/#/mlp_1/w" in templates(inside)


@pytest.mark.parametrize("axis", [0, 1])
def test_layers_on_an_axis_are_leaves_where_the_other_side_has_these(axis):
    layers = {f"{t}/layers_{i}/{n}": s for t in "ab" for i in range(3) for n, s in (("w", (2, 4)), ("v", (2,)))}
    stacked = {f"{t}/x/{n}": (*s[:axis], 3, *s[axis:]) for t in "ab" for n, s in (("w", (2, 4)), ("v", (2,)))}
    sides = Sides(items(stacked), items(layers))
    assert {len(kind.members) for tree in (sides.source, sides.target) for kind in tree.kinds} == {3}
    assert {leaf.axis for kind in sides.source.kinds for leaf in kind.members.values()} == {axis}
    assert templates(stacked) == dict.fromkeys(stacked, 1)
    # As many layers as the matrix has rows: nothing shows the axis.
    assert templates({"w": (3, 3, 3)}, {f"layers_{i}/w": (3, 3) for i in range(3)}) == {"w": 1}


def test_blocks_of_several_layers_and_a_rest_are_layers():
    layers = {f"layers.{i}.w": (2, 5) for i in range(8)}
    blocks = {f"blocks/layers_{j}/w": (2, 2, 5) for j in range(3)} | {f"rest/layers_{j}/w": (2, 5) for j in range(2)}
    (kind,) = Sides(items(layers), items(blocks)).target.kinds
    found = [kind.members[((i, 8),)] for i in range(8)]
    assert [(leaf.name.split("/")[1], leaf.layer) for leaf in found] == [
        *[(f"layers_{i % 3}", i // 3) for i in range(6)], ("layers_0", None), ("layers_1", None)
    ]  # fmt: skip
