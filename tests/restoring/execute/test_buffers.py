"""Buffers of shards become arrays without a copy."""

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from tests.support.memory_checkpoint import checkpoint
from tests.support.placed_arrays import mesh, sharded, values


@pytest.mark.slow
def test_memory_kinds_and_layouts_are_used():
    pinned = NamedSharding(mesh(), P("x"), memory_kind="unpinned_host")
    got = ot.restore(checkpoint({"a": values((8,))}), {"a": jax.ShapeDtypeStruct((8,), np.float32, sharding=pinned)})
    assert got["a"].sharding.memory_kind == "unpinned_host"
    columns_first = Format(Layout(major_to_minor=(1, 0)), NamedSharding(mesh(), P("x")))
    array = values((8, 4))
    for target in (
        jax.ShapeDtypeStruct((8, 4), np.float32, sharding=columns_first),
        jax.device_put(array, columns_first),
    ):
        got = ot.restore(checkpoint({"a": array}), {"a": target})["a"]
        assert got.format.layout.major_to_minor == (1, 0)
        np.testing.assert_array_equal(np.asarray(got), array)


def test_buffers_are_adopted_not_copied():
    got = ot.restore(checkpoint({"a": values((8, 512))}), {"a": sharded((8, 512))})
    assert len({shard.data.unsafe_buffer_pointer() for shard in got["a"].addressable_shards}) == 1


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (0, 8)])
def test_scalars_and_empties(kind, shape):
    array = values(shape)
    got = ot.restore(checkpoint({"a": array}, kind), {"a": sharded(shape)})
    assert got["a"].shape == shape
    np.testing.assert_array_equal(np.asarray(got["a"]), array)
