"""Saves and restores of trees with stock Orbax handlers, by the table of type handlers."""

from __future__ import annotations

import numpy as np
import orbax.checkpoint as ocp

import orbax_t5x as ot
from orbax_t5x.testing.transform_suite import as_numpy
from orbax_t5x.trees.flat import flatten

LAZY = ocp.RestoreArgs(restore_type=ot.LazyArray)


def save(path, tree, save_args=None, **options):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree, save_args=save_args))
    return path


def restore(path, restore_args=None, **options):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        return checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=restore_args))


def noise(*shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def assert_trees_equal(tree, expected):
    tree, expected = flatten(tree), flatten(expected)
    assert tree.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(as_numpy(tree[name]), as_numpy(value), err_msg=name)
