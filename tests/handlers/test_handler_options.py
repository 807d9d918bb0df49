"""Options of Orbax's handler that ours takes hold for restores too, and those of single leaves for saves: beside stock
Orbax with the same options."""

import base64
import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError, RestorePlanError
from orbax_t5x.restoring import executor


@dataclasses.dataclass
class Point:
    """A user's type, which JAX takes for a leaf."""

    x: int
    y: int


class PointHandler(ocp.type_handlers.NumpyHandler):
    """Stores points as arrays of two numbers."""

    def typestr(self):
        return "Point"

    async def serialize(self, values, infos, args=None):
        return await super().serialize([np.array([value.x, value.y]) for value in values], infos, args)

    async def deserialize(self, infos, args=None):
        return [Point(*array.tolist()) for array in await super().deserialize(infos)]


class NegatedHandler(ocp.type_handlers.NumpyHandler):
    """Stores arrays with another sign: whoever reads them without it has other values."""

    async def serialize(self, values, infos, args=None):
        return await super().serialize([-value for value in values], infos, args)

    async def deserialize(self, infos, args=None):
        return [-array for array in await super().deserialize(infos, args)]


def registry(numpy_handler=None):
    return ocp.type_handlers.create_type_handler_registry(
        (int, ocp.type_handlers.ScalarHandler()),
        (np.ndarray, numpy_handler or ocp.type_handlers.NumpyHandler()),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
        (Point, PointHandler()),
    )


def save(path, handler, args):
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=args)
    return path


def restore(path, handler, args=None):
    with ocp.Checkpointer(handler) as checkpointer:
        return checkpointer.restore(path) if args is None else checkpointer.restore(path, args=args)


def assert_equal(restored, expected):
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert type(one) is type(other)
        if hasattr(other, "dtype"):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other


# -- a table of type handlers


@pytest.fixture
def points():
    return {"a": Point(1, 2), "w": np.ones(3), "n": {"p": Point(3, 4), "j": jnp.ones(4), "i": 5, "none": None}}


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
        {
            "a": tree["a"],
            "b": np.asarray(tree["b"]),
        },
    )
    moved = ot.args.TrainStateRestore({"c": np.zeros(4), "b": ...}, [ot.transforms.Rename([("a", "c")])])
    for args in (ot.args.TrainStateRestore(None), dataclasses.replace(moved, is_resuming=False)):
        with pytest.raises(RestorePlanError, match="and only that can restore it"):
            restore(path, handler, args)


def test_a_registry_that_is_given_the_class(tmp_path):
    """Orbax then makes a handler for each kind of arguments: what one recorded, the other must know."""
    made = ocp.handlers.DefaultCheckpointHandlerRegistry()
    made.add(None, ot.args.TrainStateSave, ot.TrainStateHandler)
    made.add(None, ot.args.TrainStateRestore, ot.TrainStateHandler)
    rename = ot.transforms.Rename([("a", "b")])
    with ocp.CheckpointManager(tmp_path, handler_registry=made) as manager:
        manager.save(0, args=ot.args.TrainStateSave({"a": np.ones(2)}, provenance=()))
        manager.wait_until_finished()
        restored = manager.restore(0, args=ot.args.TrainStateRestore({"b": np.zeros(2)}, [rename]))
        manager.save(1, args=ot.args.TrainStateSave(restored))
        manager.wait_until_finished()
        again = manager.restore(1, args=ot.args.TrainStateRestore({"b": np.zeros(2)}, [rename]))
    np.testing.assert_array_equal(again["b"], np.ones(2))
    with ot.open_checkpoint(tmp_path / "1") as checkpoint:
        assert checkpoint.metadata["custom_metadata"]["orbax_t5x"]["provenance"][-1]["digest"]


# -- restores without a target


@pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")
@pytest.mark.parametrize("name", ["aggregate_some", "aggregate_all"])
def test_items_of_early_versions_are_restored_as_by_orbax(tmp_path, goldens, name):
    item = shutil.copytree(goldens / "orbax_aggregate" / f"{name}.checkpoint", tmp_path / name)
    expected = restore(item, ocp.PyTreeCheckpointHandler(), ocp.args.PyTreeRestore())
    for args in (None, ot.args.TrainStateRestore()):
        assert_equal(restore(item, ot.TrainStateHandler(), args), expected)


def test_devices_that_are_not_here_are_a_problem_by_leaf(tmp_path):
    path = save(tmp_path / "item", ot.TrainStateHandler(), ot.args.TrainStateSave({"a": {"b": jnp.ones(2)}, "c": 1}))
    file = path / "_sharding"
    shardings = json.loads(file.read_text())
    name = base64.b64encode(b"a.b").decode()
    shardings[name] = shardings[name].replace(str(jax.devices()[0]), "TPU_99")
    file.write_text(json.dumps(shardings))
    with pytest.raises(ValueError):
        restore(path, ocp.StandardCheckpointHandler(), ocp.args.StandardRestore())
    with pytest.raises(RestorePlanError, match="TPU_99") as raised:
        restore(path, ot.TrainStateHandler())
    assert [problem.leaf for problem in raised.value.problems] == ["a/b"]


# -- how much at once


@pytest.fixture
def limits(monkeypatch):
    """The bytes that each restore of ours is granted."""
    seen = []

    class Budget(executor.Budget):
        def __init__(self, limit):
            seen.append(limit)
            super().__init__(limit)

    monkeypatch.setattr(executor, "Budget", Budget)
    return seen


def test_restore_concurrent_gb_bounds_restores_with_a_target(tmp_path, limits):
    tree = {"a": np.ones(2)}
    path = save(tmp_path / "item", ot.TrainStateHandler(), ot.args.TrainStateSave(tree))
    for handler, given in (
        (ot.TrainStateHandler(), None),
        (ot.TrainStateHandler(restore_concurrent_gb=2), None),
        (ot.TrainStateHandler(restore_concurrent_gb=2), 1 << 20),
        (ot.TrainStateHandler(restore_concurrent_gb=1), 3 << 30),
    ):
        assert_equal(restore(path, handler, ot.args.TrainStateRestore(tree, memory_limit_bytes=given)), tree)
    assert limits == [256 << 20, 2 * 10**9, 1 << 20, 10**9]


@pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")
def test_restore_concurrent_gb_bounds_restores_without_a_target(tmp_path):
    path = save(tmp_path / "item", ot.TrainStateHandler(), ot.args.TrainStateSave({"a": jnp.ones(1000)}))
    little = {"restore_concurrent_gb": 1e-6}
    for handler in (ocp.PyTreeCheckpointHandler(**little), ocp.StandardCheckpointHandler(**little)):
        args = ocp.args.StandardRestore() if isinstance(handler, ocp.StandardCheckpointHandler) else None
        with pytest.raises(ValueError, match="more bytes than"):
            restore(path, handler, args)
    with pytest.raises(ValueError, match="more bytes than"):
        restore(path, ot.TrainStateHandler(**little))


# -- errors that are no failures to write


@pytest.mark.parametrize("checkpointer_type", [ocp.Checkpointer, ocp.AsyncCheckpointer])
def test_an_empty_tree_is_a_value_error_as_in_orbax(tmp_path, checkpointer_type):
    raised = []
    for handler, args in (
        (ocp.PyTreeCheckpointHandler(), ocp.args.PyTreeSave({})),
        (ot.TrainStateHandler(), ot.args.TrainStateSave({})),
    ):
        with checkpointer_type(handler) as checkpointer, pytest.raises(ValueError, match="empty") as caught:
            checkpointer.save(tmp_path / "item", args=args)
        raised.append(caught.value)
    assert type(raised[0]) is type(raised[1]) is ValueError
    assert not isinstance(raised[1], CheckpointIOError)


@pytest.mark.parametrize(
    ("error", "is_io"),
    [
        (ValueError("ArrayMetadata not found for a"), False),
        (KeyError("a"), False),
        (ValueError("INVALID_ARGUMENT: Error opening"), False),
        (ValueError("UNAVAILABLE: Error writing"), True),
        (ValueError("INTERNAL: Error writing: No space left on device"), True),
        (OSError("no"), True),
    ],
)
def test_only_failures_of_a_store_are_io_errors(tmp_path, monkeypatch, error, is_io):
    handler = ot.TrainStateHandler()

    def fails(directory):
        raise error

    monkeypatch.setattr(handler._orbax, "finalize", fails)
    with pytest.raises(CheckpointIOError if is_io else type(error)) as caught:
        save(tmp_path / "item", handler, ot.args.TrainStateSave({"a": np.ones(2)}))
    assert (caught.value is error) != is_io
    assert list(tmp_path.iterdir()) == []


# -- options of single leaves


def stored(path):
    """The dtype and the chunks of each array, from zarr's own metadata."""
    return {
        file.parent.name: (read["dtype"], read["chunks"])
        for file in path.glob("*/.zarray")
        for read in [json.loads(file.read_text())]
    }


def test_options_of_single_leaves_are_stored_as_by_orbax(tmp_path):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    sharded = jax.device_put(np.ones((32, 16), np.float32), NamedSharding(mesh, PartitionSpec("x", "y")))
    tree = {"params": {"a": np.ones((64, 8), np.float32), "b": sharded, "c": jnp.ones(6)}, "step": 3, "none": None}
    options = {
        "params": {
            "a": ocp.SaveArgs(chunk_byte_size=256),
            "b": ocp.SaveArgs(dtype=np.dtype(jnp.bfloat16), chunk_byte_size=32, shard_axes=(1,)),
            "c": None,
        },
        "step": ocp.SaveArgs(dtype=np.int16),
        "none": None,
    }
    theirs = ocp.args.PyTreeSave(tree, save_args=jax.tree.map(lambda x: x or ocp.SaveArgs(), options, is_leaf=is_none))
    expected = stored(save(tmp_path / "stock", ocp.PyTreeCheckpointHandler(use_ocdbt=False), theirs))
    ours = ot.args.TrainStateSave(tree, save_args=options)
    path = save(tmp_path / "ours", ot.TrainStateHandler(use_ocdbt=False), ours)
    assert stored(path) == expected
    assert expected["params.b"] == ("bfloat16", [8, 1])
    # Before the dtype of all parameters.
    ours = ot.args.TrainStateSave(tree, dtype=np.float16, save_args=options)
    path = save(tmp_path / "both", ot.TrainStateHandler(use_ocdbt=False), ours)
    assert {name: dtype for name, (dtype, _) in stored(path).items()} == {
        **{name: dtype for name, (dtype, _) in expected.items()},
        "params.a": "<f2",
        "params.c": "<f2",
    }


def is_none(node):
    return node is None


def test_options_of_lazy_leaves(tmp_path):
    values = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    source = save(tmp_path / "source", ot.TrainStateHandler(), ot.args.TrainStateSave({"a": values, "b": values}))
    handler = ot.TrainStateHandler(use_ocdbt=False)
    with ot.open_checkpoint(source) as opened:
        options = {
            "a": ocp.SaveArgs(dtype=jnp.bfloat16, chunk_byte_size=256),
            "b": ocp.SaveArgs(chunk_byte_size=256, shard_axes=(1,)),
        }
        path = save(tmp_path / "item", handler, ot.args.TrainStateSave(opened.tree(), save_args=options))
    assert stored(path) == {"a": ("bfloat16", [16, 8]), "b": ("<f4", [64, 1])}
    restored = ot.restore(path, None)
    np.testing.assert_array_equal(restored["a"], values.astype(jnp.bfloat16))
    np.testing.assert_array_equal(restored["b"], values)


def test_options_of_single_leaves_follow_the_names_that_are_saved(tmp_path):
    state = nnx.state(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    options = jax.tree.map(lambda _: ocp.SaveArgs(dtype=jnp.bfloat16), state)
    path = save(tmp_path / "nnx", ot.TrainStateHandler(), ot.args.TrainStateSave(state, save_args=options))
    assert {leaf.dtype for leaf in jax.tree.leaves(ot.restore(path, None))} == {np.dtype(jnp.bfloat16)}
    rename = ot.transforms.Rename([("kernel", "w")])
    tree = {"kernel": np.ones(2, np.float32)}
    args = ot.args.TrainStateSave(tree, transforms=[rename], save_args={"w": ocp.SaveArgs(dtype=np.float16)})
    assert ot.restore(save(tmp_path / "renamed", ot.TrainStateHandler(), args), None)["w"].dtype == np.float16


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"b": ocp.SaveArgs()}, ValueError, "'b', and the tree"),
        ({"a": np.float16}, ValueError, "at 'a'; pass ocp.SaveArgs"),
        ({"a": ocp.SaveArgs(dtype=np.dtype("S3"))}, RestorePlanError, "not a dtype that Orbax stores"),
    ],
)
def test_options_that_fit_no_leaf_fail_before_anything_is_written(tmp_path, options, error, match):
    with pytest.raises(error, match=match):
        args = ot.args.TrainStateSave({"a": np.ones(2)}, save_args=options)
        save(tmp_path / "item", ot.TrainStateHandler(), args)
    assert list(tmp_path.iterdir()) == []
