"""Rules by name split any tree."""

from __future__ import annotations

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.partitioning import AxisMetadata
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from orbax_t5x import with_shardings
from orbax_t5x.train_state import InferenceState
from orbax_t5x.trees.flat import flatten

# Flax deprecates the traversals that T5X's MultiOptimizer takes; T5X users have nothing else to pass.
pytestmark = pytest.mark.filterwarnings("ignore:.*flax.traverse_util.Traversal:DeprecationWarning")


def mesh(shape=(2, 4), names=("data", "model")):
    return Mesh(np.asarray(jax.devices()).reshape(shape), names)


def specs(state):
    """Partition specs by name in the state dict."""
    return {name: leaf.sharding.spec for name, leaf in flatten(state.state_dict()).items() if leaf is not None}


def state_of(shape, axes, **collections):
    """An InferenceState of one parameter `w`."""
    given = {"params": {"w": np.zeros(shape, np.float32)}, "params_axes": {"w_axes": AxisMetadata(axes)}}
    return InferenceState.create({**given, **collections})


def test_rules_of_the_caller():
    state = state_of((8, 16), ("a", "b"))

    def spec(*rules, on=None):
        return specs(with_shardings(state, on or mesh(), rules))["target/w"]

    assert spec(("b", ("data", "model"))) == P(None, ("data", "model"))
    assert spec(("a", "model"), ("b", "model"), ("b", "data")) == P("model", "data")
    assert spec(("b", "model"), ("a", "model")) == P(None, "model")
    # Of several mesh axes those count that exist; a rule without any leaves room for the next.
    assert spec(("b", ("data", "replica")), on=mesh((8,), ("data",))) == P(None, ("data",))
    assert spec(("b", "replica"), ("b", "data"), on=mesh((8,), ("data",))) == P(None, "data")
    assert spec() == P(None, None)


def test_rules_for_names_split_any_tree():
    model = nn.Dense(16)

    def create():
        params = model.init(jax.random.key(0), jnp.ones((2, 8)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adafactor(1e-3))

    rules = [(r"(params|opt_state/.*/(mu|nu))/kernel", P("data", "model")), (r".*/bias", P(None))]
    sharded = with_shardings(jax.eval_shape(create), mesh(), rules)
    assert sharded.params["kernel"].sharding.spec == P("data", "model")
    assert sharded.params["bias"].sharding.spec == P(None)
    # Names go before axes, in T5X's states and in boxes too.
    state = state_of((4, 8), ("embed", "mlp"))
    assert specs(with_shardings(state, mesh(), [("target/w", P("data")), ("mlp", "model")]))["target/w"] == P("data")
    boxed = {"w": nn.Partitioned(np.ones((4, 8)), ("data", "model"))}
    assert with_shardings(boxed, mesh(), [("w", P())])["w"].value.sharding.spec == P()


def test_a_rule_that_no_leaf_takes_is_a_warning():
    """`kernel` is no whole name: without a word the leaf would be on every device."""
    tree = {"layer": {"kernel": np.ones((4, 8)), "bias": np.ones(8)}}
    rules = [("kernel", P("data")), (".*/bias", P()), ("layer/bias", P("model"))]
    with pytest.warns(UserWarning, match=r"no leaf's whole name matches.*: 'kernel', 'layer/bias'\."):
        found = with_shardings(tree, mesh(), rules)
    assert found["layer"]["kernel"].sharding.spec == P()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_shardings(tree, mesh(), [(".*/kernel", P("data")), (".*", P())])


@pytest.mark.parametrize("own", [(), (("embed", "data"), ("model", "data"))])
def test_a_logical_axis_that_is_called_as_a_mesh_axis_follows_its_rule(own):
    """`data` is taken by the first dimension, and `model` is a logical axis: the second is not split."""
    rules = [("embed", "data"), ("model", "data")]
    boxed = {"w": nn.LogicallyPartitioned(np.ones((4, 8)), ("embed", "model"), rules=own or None)}
    sharded = with_shardings(boxed, mesh(), [("other", None)] if own else rules)
    assert jax.tree.leaves(sharded)[0].sharding.spec == P("data", None)
