"""A moment is called exact only where the other model's training would have made it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orbax_t5x import transforms as tr
from orbax_t5x.optim.optax_state import to_state_dict
from orbax_t5x.testing.transform_suite import run
from orbax_t5x.trees.flat import flatten

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
OPTIMIZERS = {
    "adam": optax.adam(0.1),
    "sgd": optax.sgd(0.1, momentum=0.9),
    "lion": optax.lion(0.1),
    "lars": optax.lars(0.1),
    "novograd": optax.novograd(0.1),
    "adafactor": optax.adafactor(0.1, momentum=0.9, min_dim_size_to_factor=2),
}
PARAMS = {f"layers_{i}": {"w": np.random.default_rng(i).normal(size=(3, 4)).astype(np.float32)} for i in range(2)}
STACKED = {"layers": {"w": np.stack([layer["w"] for layer in PARAMS.values()])}}


def trained(optimizer, params):
    """State after two steps whose gradients are the same numbers in both layouts."""
    state = optimizer.init(params)
    for step in range(2):
        grads = jax.tree.map(lambda leaf, step=step: jnp.sin(leaf + step), params)
        _, state = optimizer.update(grads, state, params)
    return {
        name: np.asarray(leaf) for name, leaf in flatten({"params": params, "opt_state": to_state_dict(state)}).items()
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_called_exact_are_those_of_training_the_stacked_model(name):
    expected = trained(OPTIMIZERS[name], STACKED)
    result, diagnostics = run(
        tr.StackLayers(r"params/layers_(\d)/(.*)", r"params/layers/\2", 0), trained(OPTIMIZERS[name], PARAMS), expected
    )
    exact = [slot for slot, fidelity in diagnostics.fidelity.items() if fidelity == "exact"]
    for slot in exact:
        np.testing.assert_allclose(result[slot], expected[slot], rtol=1e-5, err_msg=slot)
    approximate = {slot.split("/")[2] for slot, fidelity in diagnostics.fidelity.items() if fidelity == "approximate"}
    lost = {slot.split("/")[2] for slot in diagnostics.lost}
    assert (approximate, lost) == {
        "lars": ({"trace"}, set()),
        "novograd": ({"mu"}, {"nu"}),
        "adafactor": ({"ema"}, set()),
    }.get(name, (set(), set()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_of_a_renamed_parameter_are_exact(name):
    source = trained(OPTIMIZERS[name], PARAMS)
    result, diagnostics = run(tr.Rename([("params/layers_0/w", "params/first/w")]), source)
    assert set(diagnostics.fidelity.values()) == {"exact"} and not diagnostics.lost
    for slot in source:
        np.testing.assert_array_equal(result[slot.replace("layers_0", "first")], source[slot])
