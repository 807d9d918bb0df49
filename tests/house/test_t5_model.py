"""The small T5 of the tests is one function in its layouts, with the names that T5X gives it."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from orbax_t5x.trees.flat import flatten
from tests.support import t5_model

UNROLLED = t5_model.T5Config(encoder_layers=1, decoder_layers=2)
SCANNED = t5_model.T5Config(encoder_layers=1, decoder_layers=2, scan_layers=True)


def test_names_and_shapes_are_t5xs(goldens):
    leaves = json.loads((goldens / "train_state" / "d1_inference_params_only.json").read_text())["leaves"]
    _, variables = t5_model.init()
    expected = {
        name.removeprefix("target/"): tuple(leaf["shape"]) for name, leaf in leaves.items() if "target/" in name
    }
    assert {name: leaf.shape for name, leaf in flatten(variables["params"]).items()} == expected


@pytest.mark.slow
def test_scanned_and_unrolled_agree():
    unrolled, variables = t5_model.init(UNROLLED)
    inputs, targets = t5_model.batch(3)
    expected = jax.jit(unrolled.apply, compiler_options=t5_model.COMPILE_FAST)(
        {"params": variables["params"]}, inputs, targets
    )
    params = t5_model.scanned_from(variables["params"], SCANNED)
    found = jax.jit(t5_model.T5(SCANNED).apply, compiler_options=t5_model.COMPILE_FAST)(
        {"params": params}, inputs, targets
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.std(expected) > 0.1


def test_no_target_sees_a_later_one():
    model, variables = t5_model.init(t5_model.T5Config(encoder_layers=1, decoder_layers=1))
    apply = jax.jit(
        lambda inputs, targets: model.apply({"params": variables["params"]}, inputs, targets),
        compiler_options=t5_model.COMPILE_FAST,
    )
    inputs, targets = t5_model.batch(0)
    logits = apply(inputs, targets)
    later = apply(inputs, targets.at[:, 6].set(5))
    np.testing.assert_array_equal(logits[:, :7], later[:, :7])
    assert not np.allclose(logits[:, 7], later[:, 7])
    assert not np.allclose(logits, apply(inputs.at[:, 0].set(7), targets))
