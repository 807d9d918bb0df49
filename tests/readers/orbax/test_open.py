"""Checkpoints that stock Orbax wrote, of every layout, against stock Orbax reading them; and T5X's (goldens)."""

import collections
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.testing.leaf_reads import assert_same, leaf_of, read
from tests.support.format_suites import OrbaxSuite, nest, save_orbax

LAYOUTS = [(ocdbt, zarr3) for ocdbt in (True, False) for zarr3 in (False, True)]
Pair = collections.namedtuple("Pair", "mu nu")


@pytest.fixture(autouse=True)
def quiet():
    """Orbax warns in its log about layouts that it does not prefer."""
    logging.getLogger("absl").setLevel(logging.ERROR)


def rows_and_columns(array):
    """An array over eight devices, two by four."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b")))


class TestOcdbt(OrbaxSuite):
    pass


class TestOcdbtZarr3(OrbaxSuite):
    zarr3 = True


class TestDirectories(OrbaxSuite):
    ocdbt = False


class TestDirectoriesZarr3(OrbaxSuite):
    ocdbt = False
    zarr3 = True


class TestSharded(OrbaxSuite):
    """Written by eight devices: eight chunks."""

    dtypes = (np.dtype(np.float32), np.dtype(jnp.bfloat16))

    def write(self, directory, arrays):
        sharded = {
            name: rows_and_columns(array) if array.shape == (1024, 2048) else array for name, array in arrays.items()
        }
        return save_orbax(directory / "item", nest(sharded))

    def test_chunks_are_shards(self, opened):
        assert leaf_of(opened, "big/matrix").chunks == (512, 512)


class TestManagerStep(OrbaxSuite):
    """The newest step of a root that a CheckpointManager wrote."""

    def write(self, directory, arrays):
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, step_prefix="run")
        with ocp.CheckpointManager(directory / "root", options=options) as manager:
            manager.save(0, args=ocp.args.StandardSave({"w": np.zeros(2)}))
            manager.save(12, args=ocp.args.StandardSave(nest(arrays)))
        return directory / "root"

    def test_the_step(self, opened):
        assert opened.step == 12
        assert opened.metadata["item_names"] == ["default"]


TREE = {
    "dict": {"w": np.arange(6.0).reshape(2, 3), "empty": {}},
    "list": [1, 2.5, np.float32(3)],
    "tuple": (np.int8(1), None),
    "named": Pair(np.zeros(2, np.float32), {}),
    "empty_list": [],
    "empty_tuple": (),
    "none": None,
    "scalar": np.int64(7),
    "flag": True,
    "text": "grüße",
    "a/b": np.ones(3),
    "x.y": np.ones(2),
    "%2e%2e": np.ones(1),
}


@pytest.mark.parametrize(("ocdbt", "zarr3"), LAYOUTS)
def test_kinds_of_nodes(tmp_path, ocdbt, zarr3):
    path = save_orbax(tmp_path / "item", TREE, ocdbt=ocdbt, zarr3=zarr3, custom_metadata={"by": ["us"]})
    stock = ocp.PyTreeCheckpointer().restore(path)
    with ot.open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "orbax"
        assert list(checkpoint.leaves) == [
            "%2e%2e",
            "a/b",
            "dict/w",
            "flag",
            "list/0",
            "list/1",
            "list/2",
            "named/mu",
            "scalar",
            "text",
            "tuple/0",
            "x.y",
        ]
        for name, value in {
            "dict/w": stock["dict"]["w"],
            "list/0": stock["list"][0],
            "list/1": stock["list"][1],
            "list/2": stock["list"][2],
            "tuple/0": stock["tuple"][0],
            "named/mu": stock["named"]["mu"],
            "a/b": stock["a/b"],
            "x.y": stock["x.y"],
            "%2e%2e": stock["%2e%2e"],
        }.items():
            np.testing.assert_array_equal(checkpoint.leaves[name].get(), value)
        assert checkpoint.leaves["scalar"].get() == 7
        assert checkpoint.leaves["scalar"].shape == ()
        assert checkpoint.leaves["flag"].get()
        text = checkpoint.leaves["text"]
        assert (text.shape, text.dtype) == ((), object)
        assert text.get()[()] == "grüße".encode()
        tree = checkpoint.tree()
        assert tree["none"] is None
        assert tree["dict"]["empty"] == {}
        assert tree["empty_list"] == []
        assert tree["empty_tuple"] == ()
        assert tree["tuple"]["1"] is None
        assert tree["named"]["nu"] == {}
        assert checkpoint.metadata["custom_metadata"] == {"by": ["us"]}
        item = checkpoint.metadata["items"][""]
        assert (item["use_ocdbt"], item["use_zarr3"]) == (ocdbt, zarr3)
        assert item["value_types"]["text"] == "string"
        assert item["value_types"]["named/nu"] == "Dict"


@pytest.mark.slow
@pytest.mark.parametrize("ocdbt", [True, False])
def test_typed_keys(tmp_path, ocdbt):
    keys = {
        "one": jax.random.key(3),
        "many": {"k": jax.random.split(jax.random.key(5, impl="rbg"), (2, 3))},
        "w": jnp.ones(3),
    }
    path = save_orbax(tmp_path / "item", keys, ocdbt=ocdbt)
    with ot.open_checkpoint(path) as checkpoint:
        assert checkpoint.metadata["items"][""]["prng_impls"] == {"one": "threefry2x32", "many/k": "rbg"}
        for name, key in {"one": keys["one"], "many/k": keys["many"]["k"]}.items():
            leaf = leaf_of(checkpoint, name)
            assert leaf.prng_impl == str(jax.random.key_impl(key))
            assert_same(checkpoint.leaves[name].get(), np.asarray(jax.random.key_data(key)))
        assert leaf_of(checkpoint, "w").prng_impl is None


def test_a_tree_that_is_one_array(tmp_path):
    for ocdbt in (True, False):
        path = save_orbax(tmp_path / f"{ocdbt}", np.arange(3), ocdbt=ocdbt)
        with ot.open_checkpoint(path) as checkpoint:
            np.testing.assert_array_equal(checkpoint.leaves[""].get(), np.arange(3))


def test_a_list_of_arrays(tmp_path):
    path = save_orbax(tmp_path / "item", [np.ones(1), np.zeros(2)])
    with ot.open_checkpoint(path) as checkpoint:
        assert {name: view.shape for name, view in checkpoint.leaves.items()} == {"0": (1,), "1": (2,)}


def test_a_standard_checkpointer(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "3", {"w": rows_and_columns(jnp.arange(64.0).reshape(8, 8))})
        checkpointer.wait_until_finished()
    for path in (tmp_path / "3", tmp_path):
        with ot.open_checkpoint(path) as checkpoint:
            assert checkpoint.step == 3
            np.testing.assert_array_equal(checkpoint.leaves["w"].get(), np.arange(64.0).reshape(8, 8))


def test_several_items(several_items):
    for path in (several_items, several_items / "ckpt_00000040"):
        with ot.open_checkpoint(path) as checkpoint:
            assert checkpoint.step == 40
            assert list(checkpoint.leaves) == ["array/checkpoint", "opt/m/w", "params/w"]
            np.testing.assert_array_equal(checkpoint.leaves["params/w"].get(), np.ones(2))
            np.testing.assert_array_equal(checkpoint.leaves["array/checkpoint"].get(), np.arange(3))
            assert checkpoint.tree()["opt"]["count"] is None
            assert checkpoint.metadata["item_names"] == ["array", "opt", "params"]
            assert checkpoint.metadata["custom_metadata"] is None
            assert checkpoint.metadata["items"]["opt"]["custom_metadata"] == {"x": 1}
            handlers = checkpoint.metadata["step_metadata"]["item_handlers"]
            assert set(handlers) == {"array", "config", "opt", "params"} | ({"metrics"} & set(handlers))


def test_one_item_of_several(several_items):
    step = several_items / "ckpt_00000040"
    for path, item in ((several_items, "opt"), (step, "opt"), (step / "opt", None), (step / "opt", "opt")):
        with ot.open_checkpoint(path, item=item) as checkpoint:
            assert checkpoint.step == 40
            assert list(checkpoint.leaves) == ["m/w"]
            assert checkpoint.metadata["custom_metadata"] == {"x": 1}
    for path in (several_items, step):
        for item in ("config", "nothing", ".."):
            with pytest.raises(ot.errors.CheckpointNotFoundError, match="'array', 'opt', 'params'"):
                ot.open_checkpoint(path, item=item)
    with pytest.raises(ot.errors.CheckpointNotFoundError, match="'params'"):
        ot.open_checkpoint(step / "opt", item="params")


@pytest.mark.parametrize("tree", [{"a": None}, {"a": {}, "b": []}, {"name": "t5"}], ids=["None", "empty", "text"])
def test_items_without_arrays(tmp_path, tree):
    """The state of `optax.sgd`, saved as an item of its own, is one."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", tree)
        assert checkpointer.restore(tmp_path / "item") == tree
    assert not (tmp_path / "item" / "manifest.ocdbt").exists()
    assert ot.restore(tmp_path / "item", tree) == tree


def test_orbax_v1(tmp_path):
    v1 = pytest.importorskip("orbax.checkpoint.experimental.v1")
    tree = {"a": {"w": np.arange(6.0).reshape(2, 3)}, "b": [np.ones(3), None, "text"], "k": jax.random.key(0)}
    v1.save(tmp_path / "one", tree)
    with ot.open_checkpoint(tmp_path / "one") as checkpoint:
        assert list(checkpoint.leaves) == ["a/w", "b/0", "b/2", "k"]
        assert_same(checkpoint.leaves["a/w"].get(), tree["a"]["w"])
        assert leaf_of(checkpoint, "k").prng_impl == "threefry2x32"
        assert checkpoint.tree()["b"]["1"] is None


def test_a_partial_save_over_an_empty_container(tmp_path):
    """The container stands in `_METADATA` beside what was put into it later."""
    path = save_orbax(tmp_path / "item", {"a": {"w": np.ones(2)}, "b": {}})
    metadata = json.loads((path / "_METADATA").read_text())
    metadata["tree_metadata"]["('a',)"] = {
        "key_metadata": [{"key": "a", "key_type": 2}],
        "value_metadata": {"value_type": "Dict", "skip_deserialize": True},
    }
    (path / "_METADATA").write_text(json.dumps(metadata))
    with ot.open_checkpoint(path) as checkpoint:
        assert list(checkpoint.leaves) == ["a/w"]
        assert checkpoint.tree()["b"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["d8_adafactor", "d1_adamw_oldjax"])
def test_t5x_through_orbax(goldens, writer):
    root = goldens / "t5x_orbax" / writer
    truth = json.loads((root / "expected_meta.json").read_text())["leaves"]
    with np.load(root / "expected.npz") as expected:
        for path in (root, root / "checkpoint_3", root / "checkpoint_3" / "state"):
            with ot.open_checkpoint(path) as checkpoint:
                assert (checkpoint.format, checkpoint.step) == ("orbax", 3)
                assert set(checkpoint.leaves) == {name for name, said in truth.items() if said.get("shape") is not None}
                assert all(name.split("/")[0] in ("target", "state") for name in checkpoint.leaves)
                if path != root:
                    continue
                for name, lazy in checkpoint.leaves.items():
                    assert lazy.dtype.name == truth[name]["dtype"]
                    assert_same(lazy.get().astype(expected[name].dtype), expected[name])
    assert ot.latest_step(root, validated=True) == 3


def test_a_multi_optimizers_none_leaves(tmp_path):
    """T5X's layout of a MultiOptimizer: parameters without an optimizer have None."""
    state = {
        "target": {"a": np.ones(2), "b": np.ones(3)},
        "state": {"step": np.int32(3), "param_states": {"a": {"m": np.zeros(2)}, "b": None}},
        "flax_mutables": {},
    }
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, step_prefix="checkpoint")
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(3, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
    with ot.open_checkpoint(tmp_path) as checkpoint:
        assert "state/param_states/b" not in checkpoint.leaves
        assert checkpoint.tree()["state"]["param_states"]["b"] is None
        assert checkpoint.empties["flax_mutables"] == {}
        assert checkpoint.leaves["state/step"].dtype == np.int32


def test_absent_chunks_of_an_early_zarr3_writer_are_the_fill_value(tmp_path):
    """Early writers left out zarr v3 chunks of zeros; their metadata does not say that every chunk is stored."""
    path = save_orbax(tmp_path / "item", {"w": rows_and_columns(jnp.ones((8, 8)))}, ocdbt=False, zarr3=True)
    (path / "w" / "c" / "1" / "2").unlink()
    with ot.open_checkpoint(path) as checkpoint, pytest.raises(ot.errors.CorruptCheckpointError, match="missing"):
        checkpoint.leaves["w"].get()
    metadata = json.loads((path / "_METADATA").read_text())
    del metadata["store_array_data_equal_to_fill_value"]
    (path / "_METADATA").write_text(json.dumps(metadata))
    expected = np.ones((8, 8), np.float32)
    expected[4:, 4:6] = 0
    with ot.open_checkpoint(path) as checkpoint:
        assert_same(checkpoint.leaves["w"].get(), expected)


def test_many_boxes_of_one_chunk(tmp_path):
    """Columns of an array that is one chunk, all in one call."""
    array = np.random.default_rng(0).random((64, 256), np.float32)
    path = save_orbax(tmp_path / "item", {"w": array})
    with ot.open_checkpoint(path) as checkpoint:
        whole = np.empty_like(array)
        requests = [Request(((0, 64), (k, k + 1)), whole[:, k : k + 1]) for k in range(256)]
        stats = read(leaf_of(checkpoint, "w"), requests)
        assert_same(whole, array)
        assert stats.bytes_read == array.nbytes


@pytest.mark.slow
def test_hundreds_of_leaves(tmp_path):
    tree = {f"layer_{k}": {"kernel": np.full((2, 2), k, np.float32), "bias": np.float32(k)} for k in range(150)}
    path = save_orbax(tmp_path / "item", tree)
    with ot.open_checkpoint(path) as checkpoint:
        assert len(checkpoint.leaves) == 300
        for k in (0, 17, 149):
            assert checkpoint.leaves[f"layer_{k}/bias"].get() == k
            np.testing.assert_array_equal(checkpoint.leaves[f"layer_{k}/kernel"].get(), np.full((2, 2), k))


@pytest.mark.parametrize("file", ["_METADATA", "manifest.ocdbt", "_METADATA is gone"])
def test_a_broken_item_leaves_the_others_open(tmp_path, file):
    state = {"a": np.ones((4, 4), np.float32), "b": np.zeros(3, np.float32)}
    with ocp.CheckpointManager(tmp_path, item_names=("state", "extra")) as manager:
        items = {"state": ocp.args.PyTreeSave(state), "extra": ocp.args.PyTreeSave({"c": np.ones(2)})}
        manager.save(1, args=ocp.args.Composite(**items))
    step = tmp_path / "1"
    (step / "extra" / file.split()[0]).unlink()
    (step / "extra" / "_METADATA").write_text("{broken") if file == "_METADATA" else None
    with ot.open_checkpoint(step) as opened:
        assert set(opened.leaves) == {"extra", "state/a", "state/b"}
        np.testing.assert_array_equal(opened.leaves["state/a"].get(), state["a"])
        with pytest.raises(ot.errors.CorruptCheckpointError, match=str(step / "extra")):
            opened.leaves["extra"].get()
    found = ot.restore(step, {"state": state}, strict=False)
    np.testing.assert_array_equal(found["state"]["a"], state["a"])
    for options in ({}, {"item": "extra"}):
        with pytest.raises(ot.errors.CorruptCheckpointError):
            ot.restore(step, None, **options)
    whole = {"state": state, "extra": {"c": np.zeros(2)}}
    with pytest.raises(ot.errors.CorruptCheckpointError, match=str(step / "extra")):
        ot.restore(step, whole, fallback=whole, strict=False)
    found = ot.restore(step, whole, fallback=whole, strict=False, fallback_for=["extra/.*"])
    np.testing.assert_array_equal(found["state"]["a"], state["a"])
