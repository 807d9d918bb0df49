"""A target with more layers than the checkpoint is one problem for each tower."""

import dataclasses

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.trees.flat import unflatten
from tests.support.failed_plans import HF_CONFIG, parameters, problems_of
from tests.support.memory_checkpoint import checkpoint


def test_more_layers_are_one_problem_for_a_tower():
    source = parameters(HF_CONFIG)
    target = parameters(dataclasses.replace(HF_CONFIG, encoder_layers=4, decoder_layers=5))
    stored = checkpoint({name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in source.items()})
    found = problems_of(stored, unflatten(target))
    assert [problem.message for problem in found] == [
        "the checkpoint's decoder has 3 layers, the target's decoder 5",
        "the checkpoint's encoder has 2 layers, the target's encoder 4",
    ]
    others = {name: np.ones(leaf.shape, leaf.dtype) for name, leaf in target.items() if name not in source}
    ot.plan_restore(stored, unflatten(target), fallback=unflatten(others))


@pytest.mark.parametrize("layer", ["layers_{}", "block_{}", "h/{}", "blocks/{}", "layer_{}"])
def test_layers_have_several_names(layer):
    def leaves(depth):
        return {f"{layer.format(i)}/{name}": np.ones(2, np.float32) for i in range(depth) for name in "abc"}

    (problem,) = problems_of(checkpoint(leaves(12)), leaves(16))
    assert problem.message == "the checkpoint has 12 layers, the target 16" and not problem.fix.transforms


def test_a_layer_that_lacks_a_leaf_is_no_other_depth():
    leaves = {f"layers_{i}/{name}": np.ones(2, np.float32) for i in range(3) for name in ("one", "other")}
    (problem,) = problems_of(checkpoint({name: leaves[name] for name in leaves if name != "layers_1/other"}), leaves)
    assert problem.leaf == "layers_1/other"
