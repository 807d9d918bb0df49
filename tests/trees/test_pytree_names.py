"""Names of arrays in nested dicts are those of JAX's key paths, in JAX's order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.trees.pytree_names import leaf_name, names_in_dicts

LEAVES = st.sampled_from([jax.ShapeDtypeStruct((2,), np.float32), np.zeros(2)])
KEYS = st.text("ab/_0~", max_size=3)
TREES = st.recursive(LEAVES, lambda below: st.dictionaries(KEYS, below, max_size=4), max_leaves=12)


@given(tree=st.dictionaries(KEYS, TREES, max_size=4), start=st.sampled_from(["", "params/"]))
def test_names_are_those_of_key_paths(tree, start):
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    assert names_in_dicts(tree, start) == [start + leaf_name(path) for path, _ in paths]
    leaves, same = jax.tree_util.tree_flatten(tree)
    assert same == treedef and all(one is other for one, (_, other) in zip(leaves, paths, strict=True))


@pytest.mark.parametrize("other", [None, 3, ..., [np.zeros(2)], (), jax.sharding.PartitionSpec(), object()])
def test_trees_of_other_nodes_have_no_names_here(other):
    assert names_in_dicts({"a": jnp.zeros(2), "b": {"c": jnp.zeros(2)}}) == ["a", "b/c"]
    assert names_in_dicts({"a": jnp.zeros(2), "b": {"c": other}}) is None
    assert names_in_dicts({"a": jnp.zeros(2), 1: jnp.zeros(2)}) is None
    assert names_in_dicts([jnp.zeros(2)]) is None
