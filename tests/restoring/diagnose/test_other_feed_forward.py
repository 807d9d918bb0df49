"""Gated against plain feed-forward layers."""

import dataclasses

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.trees.flat import unflatten
from tests.support.failed_plans import HF_CONFIG, parameters, problems_of
from tests.support.memory_checkpoint import checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_model_of_another_size_or_kind_is_said_to_be_one(is_gated):
    source = parameters(dataclasses.replace(HF_CONFIG, gated=is_gated))
    target = parameters(dataclasses.replace(HF_CONFIG, gated=not is_gated, encoder_layers=4))
    stored = checkpoint({name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in source.items()})
    one, another, *left = problems_of(stored, unflatten(target))
    assert {problem.kind for problem in left} == {"leftover"}
    fewer, other = sorted((one, another), key=lambda problem: problem.message)
    assert fewer.message == "the checkpoint's encoder has 2 layers, 4 are wanted"
    wanted = "mlp_activations=('gelu', 'linear')" if is_gated else "mlp_activations=('relu',)"
    assert "feed-forward" in other.message and wanted in str(other.fix)
    others = {name: np.ones(leaf.shape, leaf.dtype) for name, leaf in target.items() if name not in source}
    ot.plan_restore(stored, unflatten(target), fallback=unflatten(others), strict=False)
