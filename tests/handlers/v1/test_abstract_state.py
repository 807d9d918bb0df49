"""The target that Orbax v1 loads into."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
import safetensors.numpy
from flax import nnx

import orbax_t5x as ot
from tests.support.orbax_v1 import RULES, assert_same
from tests.support.train_states import inference_state, sharded, training_state
from tests.support.v1_trees import TwoLayers

# Stock Orbax, where it loads without a target.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")


@pytest.mark.slow
def test_an_abstract_module_is_a_target(tmp_path):
    module = TwoLayers(nnx.Rngs(0))
    with ot.v1.context():
        ocp.save(tmp_path / "1", nnx.state(module))
        abstract = nnx.eval_shape(lambda: TwoLayers(nnx.Rngs(1)))
        loaded = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(abstract))
    assert type(loaded) is TwoLayers
    np.testing.assert_array_equal(loaded(jnp.ones((1, 8))), module(jnp.ones((1, 8))))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ot.v1.AbstractTrainState(ot.v1.AbstractTrainState(None)), TypeError, "pass its own target"),
        (lambda: ot.v1.load_and_transform("x", ot.v1.AbstractTrainState(None)), TypeError, "pass its own target"),
        (lambda: ot.v1.AbstractTrainState({}, [3]), TypeError, "transform"),
        (lambda: ot.v1.AbstractTrainState({}, item=3), TypeError, "item"),
        (lambda: ot.v1.AbstractTrainState({}, verify="yes"), ValueError, "'touched', 'full' or 'off'"),
        (lambda: ot.v1.AbstractTrainState({}, memory_limit_bytes=0), ValueError, "at least 1"),
        (lambda: ot.v1.context({}), TypeError, "ocp.Context"),
        (lambda: ot.v1.context(checksums="no"), TypeError, "checksums must be True or False, not 'no'"),
        (lambda: ot.v1.context(on_unsupported="ignore"), ValueError, "'error' or 'skip'"),
        (lambda: ot.v1.context(provenance=[{"a": 1}]), ValueError, "provenance"),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_an_abstract_state_is_a_pytree_with_its_target_as_the_child():
    target = {"a": jax.ShapeDtypeStruct((2,), jnp.float32), "b": [...]}
    abstract = ot.v1.AbstractTrainState(target, RULES, strict=False, source="elsewhere")
    assert jax.tree.leaves(abstract) == jax.tree.leaves(target)
    again = jax.tree.map(lambda leaf: leaf, abstract)
    assert again.target == target
    assert (again.transforms, again.strict, again.source) == (RULES, False, "elsewhere")


@pytest.mark.slow
def test_only_parameters_are_loaded_from_a_training_state(tmp_path):
    state = training_state()
    with ot.v1.context():
        ocp.save(tmp_path / "1", state)
        inference = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(sharded(inference_state())))
    assert_same(inference.params, state.params)


@pytest.mark.parametrize("load", [ocp.load, lambda path, state: ocp.load_checkpointables(path, {"state": state})])
def test_a_layout_without_handlers_says_what_to_call(tmp_path, load):
    safetensors.numpy.save_file({"x": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    target = {"y": np.zeros(2, np.float32)}
    rename = ot.transforms.Rename([("x", "y")])
    state = ot.v1.AbstractTrainState(target, rename)
    context = ot.v1.context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    with context:
        with pytest.raises(ot.RestorePlanError, match=r"call ot\.v1\.load_and_transform"):
            load(tmp_path, state)
        np.testing.assert_array_equal(ot.v1.load_and_transform(tmp_path, target, rename)["y"], 1)
