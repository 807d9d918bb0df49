"""State dicts of optimizer states, and back."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from orbax_t5x import optimizers
from orbax_t5x.optim.optax_state import from_state_dict, to_state_dict
from orbax_t5x.optimizers import OptaxWrapper
from tests.support.optax_cases import OPTAX, new_key, small_params

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")


def _flat(tree):
    return traverse_util.flatten_dict(tree, sep="/")


def test_typed_keys_stay_in_state_dicts():
    definition = optimizers.noisy_sgd(0.1, key=new_key())
    optimizer = definition.create(small_params())
    state_dict = _flat(optimizer.state_dict())
    keys = [name for name, value in state_dict.items() if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)]
    assert keys == ["state/param_states/0/rng_key"]
    abstract = jax.eval_shape(definition.create, small_params())
    assert abstract.state_dict()["state"]["param_states"]["0"]["rng_key"].dtype == new_key().dtype
    restored = abstract.restore_state(optimizer.state_dict())
    assert restored.state.param_states[0].rng_key is state_dict[keys[0]]


def test_state_dicts_are_flaxs():
    for name in ("adam", "masked", "multi_transform", "inject_hyperparams", "adafactor", "contrib.schedule_free"):
        optimizer = OptaxWrapper(OPTAX[name]()).create(small_params())
        ours, theirs = to_state_dict(optimizer.state), flax.serialization.to_state_dict(optimizer.state)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        back = from_state_dict(optimizer.state, theirs)
        assert jax.tree.structure(back) == jax.tree.structure(optimizer.state)


def test_missing_entries_are_named():
    definition = optimizers.adam(0.1)
    optimizer = definition.create(small_params())
    state_dict = optimizer.state_dict()
    assert "1" not in state_dict["state"]["param_states"]
    del state_dict["state"]["param_states"]["0"]["nu"]["enc"]["w"]
    with pytest.raises(ValueError, match=r"path param_states/0/nu/enc/w is not present in the input optimizer state"):
        optimizer.restore_state(state_dict)
    del state_dict["state"]["param_states"]
    with pytest.raises(ValueError, match=r"param_states/0/count.*param_states/0/nu/enc/w.* are not present"):
        optimizer.restore_state(state_dict)
    with pytest.raises(ValueError, match="'state' is not in the state dict"):
        optimizer.restore_state({"target": state_dict["target"]})


def test_entries_too_many_or_of_the_wrong_kind_are_named():
    optimizer = optimizers.adam(0.1).create(small_params())
    state_dict = optimizer.state_dict()
    state_dict["state"]["param_states"]["0"]["trace"] = jnp.ones(3)
    with pytest.raises(ValueError, match=r"param_states/0 is a ScaleByAdamState .* has no \['trace'\]"):
        optimizer.restore_state(state_dict)
    state_dict["state"]["param_states"]["0"] = jnp.ones(3)
    with pytest.raises(ValueError, match=r"param_states/0 is a ArrayImpl, not a dict of \['count', 'mu', 'nu'\]"):
        optimizer.restore_state(state_dict)


def test_optimizers_without_state_have_only_a_step():
    optimizer = optimizers.sgd(0.1).create(small_params())
    assert set(optimizer.state_dict()["state"]) == {"step"}
    assert jax.tree.structure(optimizer.restore_state(optimizer.state_dict())) == jax.tree.structure(optimizer)


def test_empty_nodes_of_the_parameters_stay():
    optimizer = optimizers.adam(0.1).create({"a": {"w": jnp.ones(3)}, "b": {}})
    assert optimizer.state_dict()["target"]["b"] == {}
    assert "b" not in optimizer.state_dict()["state"]["param_states"]["0"]["mu"]
    restored = optimizer.restore_state(optimizer.state_dict())
    assert restored.target["b"] == {}
    assert restored.state.param_states[0].mu["b"] == {}


def test_keys_without_a_unique_text_are_refused():
    with pytest.raises(ValueError, match="unique string representation"):
        to_state_dict({1: jnp.ones(2), "1": jnp.ones(2)})
    labels = {1: jnp.ones(2), 2: jnp.ones(3)}
    assert from_state_dict(labels, to_state_dict(labels)).keys() == {1, 2}
