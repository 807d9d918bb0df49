"""Restores by Orbax itself: types of users, items of early versions."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from tests.support.point_handlers import NegatedHandler, Point, assert_equal, registry, restore, save


@pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")
def test_a_users_types_are_restored_as_by_orbax(tmp_path, points):
    path = save(
        tmp_path / "item", ot.TrainStateHandler(type_handler_registry=registry()), ot.args.TrainStateSave(points)
    )
    stock = ocp.PyTreeCheckpointHandler(type_handler_registry=registry())
    expected = restore(path, stock, ocp.args.PyTreeRestore())
    handler = ot.TrainStateHandler(type_handler_registry=registry())
    assert_equal(expected, points)
    assert_equal(restore(path, handler), expected)
    assert_equal(restore(path, handler, ot.args.TrainStateRestore()), expected)
    target = {"a": Point(0, 0), "w": np.zeros(3), "n": {"p": Point(0, 0), "j": jnp.zeros(4), "i": 0, "none": None}}
    assert_equal(restore(path, handler, ot.args.TrainStateRestore(target)), expected)
    part = {"w": np.zeros(3), "n": {"p": Point(0, 0)}}
    assert_equal(
        restore(path, handler, ot.args.TrainStateRestore(part, strict=False)),
        {"w": points["w"], "n": {"p": Point(3, 4)}},
    )


def test_transforms_go_round_a_users_types(tmp_path, points):
    handler = ot.TrainStateHandler(type_handler_registry=registry())
    path = save(tmp_path / "item", handler, ot.args.TrainStateSave(points, provenance=()))
    target = {"a": Point(0, 0), "v": np.zeros(3), "n": ...}
    restored = restore(path, handler, ot.args.TrainStateRestore(target, [ot.transforms.Rename([("w", "v")])]))
    assert_equal(restored, {"a": points["a"], "v": points["w"], "n": ...})


def test_a_users_leaf_that_the_checkpoint_lacks_is_a_problem(tmp_path, points):
    handler = ot.TrainStateHandler(type_handler_registry=registry())
    path = save(tmp_path / "item", handler, ot.args.TrainStateSave(points))
    with pytest.raises(RestorePlanError, match="type handler") as raised:
        restore(path, handler, ot.args.TrainStateRestore({"b": Point(0, 0)}, strict=False))
    assert [(problem.kind, problem.leaf) for problem in raised.value.problems] == [("missing", "b")]


def test_what_a_users_handler_stores_is_never_read_as_it_is_stored(tmp_path):
    handler = ot.TrainStateHandler(type_handler_registry=registry(NegatedHandler()))
    tree = {"a": np.arange(4.0), "b": jnp.arange(3.0)}
    path = save(tmp_path / "item", handler, ot.args.TrainStateSave(tree))
    np.testing.assert_array_equal(ot.restore(path, None)["a"], -tree["a"])
    assert_equal(restore(path, handler), tree)
    assert_equal(
        restore(path, handler, ot.args.TrainStateRestore(jax.tree.map(np.zeros_like, tree))),
        {"a": tree["a"], "b": np.asarray(tree["b"])},
    )
    moved = ot.args.TrainStateRestore({"c": np.zeros(4), "b": ...}, [ot.transforms.Rename([("a", "c")])])
    for args in (ot.args.TrainStateRestore(None), dataclasses.replace(moved, is_resuming=False)):
        with pytest.raises(RestorePlanError, match="and only that can restore it"):
            restore(path, handler, args)


@pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")
@pytest.mark.parametrize("name", ["aggregate_some", "aggregate_all"])
def test_items_of_early_versions_are_restored_as_by_orbax(tmp_path, goldens, name):
    item = shutil.copytree(goldens / "orbax_aggregate" / f"{name}.checkpoint", tmp_path / name)
    expected = restore(item, ocp.PyTreeCheckpointHandler(), ocp.args.PyTreeRestore())
    for args in (None, ot.args.TrainStateRestore()):
        assert_equal(restore(item, ot.TrainStateHandler(), args), expected)


def test_arrays_beside_values_without_a_sharding_are_a_problem(tmp_path, goldens):
    """Orbax 0.4 wrote arrays of JAX beside a msgpack file, without the file of shardings."""
    item = shutil.copytree(goldens / "orbax_aggregate" / "aggregate_some.checkpoint", tmp_path / "item")
    text = (item / "_METADATA").read_text()
    array, stored = '"value_type": "np.ndarray"', '"skip_deserialize": false'
    (item / "_METADATA").write_text(text.replace(f"{array}, {stored}", f'"value_type": "jax.Array", {stored}'))
    with pytest.raises(ot.RestorePlanError) as raised:
        ocp.Checkpointer(ot.TrainStateHandler()).restore(item)
    assert [(problem.kind, problem.leaf) for problem in raised.value.problems] == [("sharding", "a"), ("sharding", "b")]
    assert "pass a target" in str(raised.value)
    plain = ot.restore(item, None)
    restored = ocp.Checkpointer(ot.TrainStateHandler()).restore(item, args=ot.args.TrainStateRestore(plain))
    np.testing.assert_array_equal(restored["a"], plain["a"])
