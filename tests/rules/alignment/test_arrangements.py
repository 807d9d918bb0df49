"""Layers stacked or not, matrices transposed or not: every arrangement in which the shapes are equal."""

import pytest

from orbax_t5x.rules.alignment.arrangements import arrangements, last_part
from tests.support.aligned_leaves import items


def shapes(side):
    return {"/".join(map(str, item.path)): item.shape for item in side}


UNROLLED = {
    f"{tower}/layers_{i}/{name}": shape
    for tower in "ab"
    for i in range(3)
    for name, shape in (("w", (2, 4)), ("v", (2,)))
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("back", [False, True])
def test_layers_are_stacked_on_the_axis_that_fits(axis, back):
    stacked = {
        f"{tower}/x/{name}": (*shape[:axis], 3, *shape[axis:])
        for tower in "ab"
        for name, shape in (("w", (2, 4)), ("v", (2,)))
    }
    sides = items(UNROLLED), items(stacked)
    (found,) = arrangements(*(reversed(sides) if back else sides))
    layers = found.theirs if back else found.ours
    assert shapes(layers)["a/layers/w"] == stacked["a/x/w"]
    assert {(item.axis, len(item.names)) for item in layers} == {(axis, 3)}


def test_some_towers_may_be_stacked():
    unrolled = {**UNROLLED, **{f"c/layers_{i}/w": (5,) for i in range(2)}}
    stacked = {name: shape for name, shape in unrolled.items() if name[0] != "c"} | {"c/layers/w": (2, 5)}
    (found,) = arrangements(items(unrolled), items(stacked))
    assert sorted(len(item.names) for item in found.ours) == [1] * 12 + [2]


def test_several_axes_may_fit():
    """As many layers as the matrix has rows."""
    found = arrangements(items({f"layers_{i}/w": (3, 3) for i in range(3)}), items({"w": (3, 3, 3)}))
    assert [one.ours[0].axis for one in found] == [0, 1, 2]


def test_matrices_of_pytorch_are_transposed_but_for_tables():
    torch = items({"shared.weight": (9, 4), "head.weight": (9, 4), "wi.weight": (5, 4), "norm.weight": (4,)})
    flax = items({"shared/embedding": (9, 4), "head/kernel": (4, 9), "wi/kernel": (4, 5), "norm/scale": (4,)})
    (found,) = arrangements(torch, flax)
    assert [item.names[0] for item in found.ours if item.is_turned] == ["head.weight", "wi.weight"]
    (found,) = arrangements(flax, torch)
    assert [item.names[0] for item in found.theirs if item.is_turned] == ["head.weight", "wi.weight"]


def test_square_matrices_have_two_arrangements():
    found = arrangements(items({"a.weight": (4, 4)}), items({"a/kernel": (4, 4)}))
    assert [one.ours[0].is_turned for one in found] == [False, True]


def test_the_kind_is_the_last_part_but_for_nnx():
    assert [last_part(item) for item in items({"a/kernel/value": (1,), "value": (1,), "a/3": (1,), "7": (1,)})] == [
        "kernel",
        "value",
        "a",
        "",
    ]
