"""Reads that share stored bytes are done together."""

from __future__ import annotations

from unittest import mock

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.lazy import as_view
from orbax_t5x.restoring.execute.groups import Piece, cut_clean, group_entries, stages_of
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


MIB = 1 << 20


def entries_of(*views):
    """The entries of a plan that makes these views, read in float32 and cast."""
    made = {f"v{number}": view for number, view in enumerate(views)}
    target = {name: jax.ShapeDtypeStruct(view.shape, ml_dtypes.bfloat16) for name, view in made.items()}
    source = checkpoint({"w": AwaitedLeaf("w", np.zeros(1, np.float32))})
    return ot.plan_restore(source, target, lambda state, _: made, strict=False, allow_lossy_cast=True).entries


def leaf_of(rows, chunk=None, columns=1):
    array = np.broadcast_to(np.float32(0), (rows, columns))
    return AwaitedLeaf("w", array, None if chunk is None else (chunk, columns))


def test_stages_need_16_mib_of_scratch_at_most():
    view = as_view(leaf_of(1 << 14, columns=1 << 10))
    for rows, count in ((1 << 14, 4), (4096, 1), (4096 + 16, 2)):
        stages = stages_of(entries_of(view[:rows]))
        assert len(stages.pieces) == count and stages.scratch_bytes == 16 * MIB


@pytest.mark.parametrize(("begin", "start", "wanted", "edge"), [(0, 0, 4, 10), (0, 0, 27, 20), (3, 7, 4, 17)])
def test_pieces_are_cut_between_chunks(begin, start, wanted, edge):
    """Views count their rows from their own beginning, pieces from where the piece before ended."""
    view = as_view(leaf_of(100, chunk=10))[begin:]
    (entry,) = entries_of(view)
    rows = view.shape[0] - start
    cut = cut_clean([Piece(entry, 0, ((start, view.shape[0]), (0, 1)))], rows, wanted)
    assert cut is not None
    (head,), (tail,) = cut
    assert (head.box[0], tail.box[0]) == ((start, edge), (edge, view.shape[0]))


def groups_of(path, sizes, limit=1 << 30, target=None, transforms=()):
    """The groups of a file of float32 arrays of so many bytes, in the order of the file."""
    arrays = {f"a{number:05}": np.zeros(size // 4, np.float32) for number, size in enumerate(sizes)}
    safetensors.numpy.save_file(arrays, path)
    return group_entries(ot.plan_restore(path, target, transforms).entries, limit)


def members(groups):
    return [len(group.entries) for group in groups]


def test_small_neighbours_fill_groups_of_4_mib(tmp_path):
    groups = groups_of(tmp_path / "a.safetensors", [MIB] * 6)
    assert members(groups) == [4, 2] and [group.size for group in groups] == [4 * MIB, 2 * MIB]
    assert members(groups_of(tmp_path / "b.safetensors", [MIB, 2 * MIB, 3 * MIB, MIB])) == [2, 2]
    # One of 4 MiB is read alone; one byte range below it is small.
    assert members(groups_of(tmp_path / "c.safetensors", [16, 4 * MIB, 16])) == [2, 1]
    assert members(groups_of(tmp_path / "d.safetensors", [16, 4 * MIB - 16])) == [2]


def test_a_lower_budget_bounds_groups(tmp_path):
    assert members(groups_of(tmp_path / "a.safetensors", [MIB] * 5, limit=2 * MIB)) == [2, 2, 1]
    assert members(groups_of(tmp_path / "a.safetensors", [MIB] * 5, limit=2 * MIB - 1)) == [1] * 5


def test_groups_have_at_most_4096_entries(tmp_path):
    assert members(groups_of(tmp_path / "a.safetensors", [4] * 4100)) == [4096, 4]


def test_a_group_holds_all_of_its_members(tmp_path):
    groups = groups_of(tmp_path / "a.safetensors", [16, 4 * MIB, 32, 64])
    (small,) = [group for group in groups if len(group.entries) > 1]
    assert [entry.name for entry in small.entries] == ["a00000", "a00002", "a00003"]
    assert [leaf.name for leaf in small.leaves] == ["a00000", "a00002", "a00003"]
    assert small.size == 16 + 32 + 64 and small.blocking
    (stage,) = small.stages
    assert not stage and [entry.name for entry in small.bare] == ["a00000", "a00002", "a00003"]


def test_entries_that_share_bytes_are_a_group_of_their_own(tmp_path):
    target = {name: np.zeros(4, np.float32) for name in ("p", "q", "r", "s")}
    rules = [ot.transforms.AssignmentMap([("[pq]", "a00000"), ("r", "a00001"), ("s", "a00002")])]
    groups = groups_of(tmp_path / "a.safetensors", [16, 16, 16], target=target, transforms=rules)
    assert [sorted(entry.name for entry in group.entries) for group in groups] == [["p", "q"], ["r", "s"]]


def test_leaves_that_are_awaited_join_no_blocking_ones(tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"b": np.ones(4, np.float32)}, path)
    awaited = checkpoint({"w": AwaitedLeaf("w", np.ones(4, np.float32))})
    plan = ot.plan_restore({"x": path, "y": awaited}, None)
    groups = group_entries(plan.entries, 1 << 30)
    assert sorted((group.blocking, len(group.entries)) for group in groups) == [(False, 1), (True, 1)]


def test_neighbours_in_the_file_are_read_together(tmp_path):
    names = "abcd"
    target = {name: np.zeros(4, np.float32) for name in names}
    rules = [ot.transforms.AssignmentMap([(name, f"a{3 - number:05}") for number, name in enumerate(names)])]
    groups = groups_of(tmp_path / "a.safetensors", [16] * 4, limit=32, target=target, transforms=rules)
    assert [[leaf.name for leaf in group.leaves] for group in groups] == [["a00000", "a00001"], ["a00002", "a00003"]]


def test_parts_of_a_leaf_that_share_no_byte_are_apart(tmp_path):
    rules = [ot.transforms.Split("a00000", axis=0, into=("p", "q"))]
    assert members(groups_of(tmp_path / "a.safetensors", [16 * MIB], transforms=rules)) == [1, 1]


def test_scratch_of_small_members_adds_up(tmp_path):
    narrow = {name: jax.ShapeDtypeStruct((4,), ml_dtypes.bfloat16) for name in ("p", "q")}
    rules = [ot.transforms.AssignmentMap([("p", "a"), ("q", "b")])]
    safetensors.numpy.save_file({"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}, tmp_path / "a.safetensors")
    plan = ot.plan_restore(tmp_path / "a.safetensors", narrow, rules, allow_lossy_cast=True)
    (group,) = group_entries(plan.entries, 1 << 30)
    assert (group.scratch, group.size) == (2 * 16, 2 * (16 + 8))
