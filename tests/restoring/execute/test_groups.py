"""Reads that share stored bytes are done together."""

from __future__ import annotations

from unittest import mock

import jax
import ml_dtypes
import numpy as np

import orbax_t5x as ot
from tests.support.memory_checkpoint import AwaitedLeaf, checkpoint


def test_heavy_and_light_views_of_a_leaf_are_read_together():
    array = np.arange(1024 * 64, dtype=np.float32).reshape(1024, 64)
    leaf = AwaitedLeaf("w", array)
    narrow = jax.ShapeDtypeStruct(array.shape, ml_dtypes.bfloat16)
    target = {"p": narrow, "q": narrow, "r": jax.ShapeDtypeStruct(array.shape, np.float32)}
    with mock.patch("orbax_t5x.restoring.execute.groups.SCRATCH_BYTES", array.nbytes // 4):
        rules = [ot.transforms.AssignmentMap([("[pqr]", "w")])]
        plan = ot.plan_restore(checkpoint({"w": leaf}), target, rules, allow_lossy_cast=True)
        got = plan.execute()
    assert plan.bytes_to_read == plan.report.bytes_read == array.nbytes
    assert len(leaf.boxes) > 4 and sum(stop - start for (start, stop), _ in leaf.boxes) == 1024
    for name, expected in [("p", array.astype(ml_dtypes.bfloat16)), ("r", array)]:
        np.testing.assert_array_equal(np.asarray(got[name]), expected)
    np.testing.assert_array_equal(np.asarray(got["p"]), np.asarray(got["q"]))
