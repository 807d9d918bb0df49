"""Each box is read once, whoever wants it."""

import numpy as np
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from tests.support.memory_checkpoint import checkpoint
from tests.support.placed_arrays import mesh, sharded, values


def test_each_box_is_read_once_however_many_devices_want_it(kind):
    source = checkpoint({"a": values((8, 4)), "b": values((8, 4))}, kind)
    ot.restore(source, {"a": sharded((8, 4)), "b": sharded((8, 4), spec=P(None, "x"), on=mesh((4, 2), ("y", "x")))})
    assert source.made["a"].boxes == [((0, 8), (0, 4))]
    assert sorted(source.made["b"].boxes) == [((0, 8), (0, 2)), ((0, 8), (2, 4))]


def test_two_targets_of_one_source_read_it_once(kind):
    source = checkpoint({"a": values((8, 4))}, kind)

    def twice(state, target):
        return {"x": state["a"], "y": state["a"]}

    got = ot.restore(source, {"x": sharded((8, 4)), "y": np.zeros((8, 4), np.float32)}, twice)
    np.testing.assert_array_equal(np.asarray(got["x"]), got["y"])
    assert source.made["a"].boxes == [((0, 8), (0, 4))]
