"""Plans as data: which boxes this process reads, and the bytes that it counts."""

import jax
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.lazy import as_view
from orbax_t5x.lazy.several import stack
from orbax_t5x.restoring.plan import RestoreReport, addressable_boxes, box_of_index, boxes_by_leaf
from tests.support.memory_checkpoint import AwaitedLeaf, checkpoint


@pytest.mark.parametrize("index", [(), (slice(2, 4),), (slice(None), slice(1, None)), (slice(None, 3), slice(None))])
def test_a_box_is_the_index_of_a_shard(index):
    array = np.arange(5 * 7).reshape(5, 7)
    box = box_of_index(index, array.shape)
    np.testing.assert_array_equal(array[tuple(slice(*side) for side in box)], array[index])


def test_boxes_are_those_of_the_shards_each_once():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))  # replicated over y
    values = np.arange(8 * 3, dtype=np.int32).reshape(8, 3)
    boxes = addressable_boxes(sharding, values.shape)
    shards = {shard.data.tobytes() for shard in jax.device_put(values, sharding).addressable_shards}
    assert len(boxes) == len(shards) == 4
    assert {values[tuple(slice(*side) for side in box)].tobytes() for box in boxes} == shards
    assert addressable_boxes(None, (2, 3)) == (((0, 2), (0, 3)),)


def test_boxes_of_a_leaf_are_gathered_over_views():
    one, other = (AwaitedLeaf(name, np.zeros((4, 2), np.float32)) for name in "ab")
    both = stack([as_view(one), as_view(other)])
    found = dict(boxes_by_leaf([(both, ((0, 2), (0, 1), (0, 2))), (as_view(one), ((0, 1), (0, 2)))]))
    assert found == {one: (((0, 1), (0, 2)),), other: (((0, 1), (0, 2)),)}


def test_a_source_of_two_leaves_counts_once():
    rows = np.zeros((4, 6), np.float32)
    source = checkpoint({"a": rows, "b": rows})
    repeat = ot.transforms.AssignmentMap([("x", "a"), ("y", "a")])
    plan = ot.plan_restore(source, {"x": rows, "y": rows, "b": rows}, [repeat])
    assert [entry.bytes_to_read for entry in plan.entries] == [96, 96, 96] and plan.bytes_to_read == 192
    plan.execute()
    assert plan.report is not None and plan.report.bytes_read == 192


def test_a_report_counts_names_in_one_line_and_lists_them_below():
    layers = tuple(f"layers_{number}/w" for number in range(12))
    report = RestoreReport(1 << 20, 5, 0, 1, layers, ("x",), (), 0.5)
    summary = report.summary()
    for words in ("1.00 MiB", "0.50 s", "1 chunk absent", "12 leaves verified", "1 leaf read only"):
        assert words in summary
    first, *lines = str(report).splitlines()
    assert first == summary and lines[0] == "verified:"
    assert "layers_{0…11}/w" in lines[1] and lines[-1] == "  x"
