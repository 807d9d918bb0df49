"""Names of leaves of any tree: those of Flax's state dicts, and those that states give themselves."""

import collections
import enum

import flax.serialization
import flax.traverse_util
import jax
import numpy as np
from flax import nnx

from orbax_t5x.train_state import InferenceState
from orbax_t5x.trees.named_leaves import named_leaves, names_itself
from orbax_t5x.trees.pytree_names import leaf_name

Key = enum.Enum("Key", {"A": "a"}, type=str)
Pair = collections.namedtuple("Pair", ["left", "right"])


def test_plain_trees_have_flaxs_names():
    tree = {"a": [1.0, {"b": 2.0}], "pair": Pair(3.0, (4.0,)), 5: 6.0}
    state_dict = flax.serialization.to_state_dict(tree)
    assert named_leaves(tree) == flax.traverse_util.flatten_dict(state_dict, sep="/")


def test_key_paths_have_flaxs_names_also_with_keys_that_are_a_kind_of_text():
    tree = {Key.A: {"x": 7.0, "y": [8.0]}}
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    flat = flax.traverse_util.flatten_dict(flax.serialization.to_state_dict(tree), sep="/")
    assert [leaf_name(path) for path in paths] == list(flat)


def test_states_name_their_own_leaves_anywhere():
    state = InferenceState.create({"params": {"w": np.ones(2)}})
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert names_itself(state) and names_itself(linear) and not names_itself({"w": 1})
    names = named_leaves({"models": [state, linear]})
    assert {"models/0/target/w", "models/1/kernel", "models/1/bias"} <= set(names)
    assert not any(name.endswith("/value") for name in names)
