"""Layers in subblocks: every N-th in one of them."""

import numpy as np
import pytest

from orbax_t5x import rules
from orbax_t5x.testing.transform_suite import run
from tests.support import relative_trees as trees

SWITCH = trees.by_name("Switch")


def switch(layout):
    sizes = trees.Sizes()
    return trees.below("target/", trees.LAYOUTS[layout](trees.minimal(SWITCH, sizes), SWITCH, sizes))


def test_layer_i_is_in_subblock_i_modulo_their_number():
    layers = {f"decoder/layers_{i}/pre_mlp_layer_norm/scale": np.full(3, i) for i in range(12)}
    stacked = run(rules.t5_unscanned_to_scanned(subblocks=3), layers)[0]
    for block in range(3):
        found = stacked[f"decoder/decoder/subblock_{block}/pre_mlp_layer_norm/scale"]
        assert found.shape == (3, 4) and found[0].tolist() == [block, block + 3, block + 6, block + 9]
    back = run(rules.t5_unscanned_to_scanned(subblocks=3).inverse(), stacked)[0]
    assert {name: int(value[0]) for name, value in back.items()} == {n: int(v[0]) for n, v in layers.items()}


def test_a_tower_of_another_number_of_subblocks_is_a_problem():
    source = switch("T5X minimal")
    (problem,) = {one.message for one in run(rules.t5_unscanned_to_scanned(subblocks=4), source)[1].problems} & {
        "'target/decoder' has 2 layers, which are not 4 subblocks of as many each"
    }
    stacked = switch("Flaxformer scanned in subblocks")
    problems = run(rules.t5_unscanned_to_scanned(subblocks=3).inverse(), stacked)[1].problems
    assert problem and {one.message for one in problems} >= {"'target/encoder' has 2 subblocks, and not 3"}
    with pytest.raises(ValueError, match="at least 1"):
        rules.t5_unscanned_to_scanned(subblocks=0)
