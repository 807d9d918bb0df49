"""Streams of NNX modules that Flax 0.10 saved, in modules of today."""

import jax
import numpy as np
import pytest
from flax import nnx

import orbax_t5x as ot
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support.memory_checkpoint import checkpoint


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.layers = nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(2)])


KEYS = [np.uint32([0, 7]), np.uint32([3, 9])]


def saved(*, streams=("default",), end=""):
    """Leaves of a `Net` by the names of Flax 0.10."""
    leaves = {"linear/kernel": np.ones((3, 3), np.float32), "linear/bias": np.ones(3, np.float32)}
    for layer, key in enumerate(KEYS):
        for stream in streams:
            leaves[f"layers/{layer}/rngs/{stream}/key"] = key
            leaves[f"layers/{layer}/rngs/{stream}/count"] = np.uint32(29 + layer)
    return checkpoint({name + end: leaf for name, leaf in leaves.items()})


def target():
    return nnx.state(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))


@pytest.mark.parametrize("rules", ["auto", ["auto", ot.transforms.Keep([".*"])]], ids=["auto", "a list"])
@pytest.mark.parametrize("stream", ["default", "dropout"])
@pytest.mark.parametrize("end", ["", "/value"])
def test_one_stream_is_the_modules(end, stream, rules):
    plan = ot.plan_restore(saved(streams=(stream,), end=end), target(), rules)
    assert "rngs" in plan.found_rules[0].describe()
    state = plan.execute()
    for layer, key in enumerate(KEYS):
        rngs = state["layers"][layer]["rngs"]
        assert int(rngs["count"].get_value()) == 29 + layer
        assert jax.dtypes.issubdtype(rngs["key"].get_value().dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(jax.random.key_data(rngs["key"].get_value()), key)


def test_a_plain_dict_with_value_names_is_a_target():
    source = saved(end="/value")
    names = {name.replace("/rngs/default", "/rngs"): leaf for name, leaf in source.leaves.items()}
    wanted = unflatten({name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in names.items()})
    got = flatten(ot.restore(source, wanted, "auto"))
    for layer, key in enumerate(KEYS):
        np.testing.assert_array_equal(got[f"layers/{layer}/rngs/key/value"], key)


@pytest.mark.parametrize("rules", ["auto", ()])
def test_several_streams_are_not_told_apart(rules):
    with pytest.raises(ot.RestorePlanError, match="rngs"):
        ot.plan_restore(saved(streams=("default", "dropout")), target(), rules)
