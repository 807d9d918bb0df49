"""Names of leaves of any tree: those of Flax's state dicts, and those that states give themselves."""

import collections

import flax.serialization
import flax.traverse_util
import numpy as np
from flax import nnx

from orbax_t5x.train_state import InferenceState
from orbax_t5x.trees.named_leaves import named_leaves, names_itself

Pair = collections.namedtuple("Pair", ["left", "right"])


def test_plain_trees_have_flaxs_names():
    tree = {"a": [1.0, {"b": 2.0}], "pair": Pair(3.0, (4.0,)), 5: 6.0}
    state_dict = flax.serialization.to_state_dict(tree)
    assert named_leaves(tree) == flax.traverse_util.flatten_dict(state_dict, sep="/")


def test_states_name_their_own_leaves_anywhere():
    state = InferenceState.create({"params": {"w": np.ones(2)}})
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert names_itself(state) and names_itself(linear) and not names_itself({"w": 1})
    names = named_leaves({"models": [state, linear]})
    assert {"models/0/target/w", "models/1/kernel", "models/1/bias"} <= set(names)
    assert not any(name.endswith("/value") for name in names)
