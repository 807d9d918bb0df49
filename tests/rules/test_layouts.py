"""The layout of a model's layers is found by names and shapes."""

import jax
import numpy as np
import pytest

from orbax_t5x.rules.layouts import Layout, axes_between, find_layout, heads_of

ONE = {"attention/query/kernel": (16, 4, 8), "mlp/wi/kernel": (16, 64)}


def tree(shapes):
    return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}


def unrolled(layers=3, *, joined=False):
    one = {**ONE, "attention/query/kernel": (16, 32)} if joined else ONE
    return find_layout(
        tree({f"target/encoder/layers_{i}/{n}": shape for i in range(layers) for n, shape in one.items()})
    )


def scanned(axis, layers=3):
    return find_layout(
        tree({f"encoder/encoder/{n}": (*shape[:axis], layers, *shape[axis:]) for n, shape in ONE.items()})
    )


def test_kinds_are_told_apart():
    assert unrolled().kind == "unscanned" and unrolled(joined=True).kind == "minimal"
    assert scanned(1).kind == "scanned" and scanned(1).is_scanned
    assert str(unrolled()) == "unscanned (encoder of 3 layers)"
    assert find_layout({"encoder.block.0.layer.0.q": 0}).kind == "hugging face"
    assert find_layout({"encoder/block_000/layer_000/q": 0}).kind == "mesh tf"
    assert find_layout(tree({"w": (2, 2)})) == Layout("unknown")


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("joined", [False, True])
def test_the_axis_of_the_layers_is_the_one_that_fits_all_leaves(axis, joined):
    assert axes_between(scanned(axis), unrolled(joined=joined)) == {"scanned": axis}
    assert axes_between(scanned(axis, layers=5), unrolled(joined=joined)) is None


def test_heads_are_those_of_the_query():
    assert heads_of(unrolled(), None) == heads_of(scanned(1), 1) == (4, 8)
    assert heads_of(unrolled(joined=True), None) is None
