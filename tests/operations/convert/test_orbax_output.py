"""A plan's views as a plain Orbax item."""

import json

import jax
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x import transforms as tr
from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.provenance import records as provenance
from tests.support.conversions import BUNDLES, GOLDENS, assert_equals, flat, names_in, record_of
from tests.support.memory_checkpoint import checkpoint
from tests.support.saving import stock


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLES)
def test_bundles_keep_every_value_and_dtype(tmp_path, name):
    source = GOLDENS / "tf_bundle" / name
    ot.convert(source, tmp_path / "out")
    with ot.open_checkpoint(source) as opened:
        expected = {leaf: view.get() for leaf, view in opened.leaves.items()}
    restored = flat(stock(tmp_path / "out"))
    assert_equals(restored, expected)
    with np.load(source / "expected.npz") as values:
        for leaf, array in restored.items():
            np.testing.assert_array_equal(np.asarray(array, values[leaf].dtype), values[leaf])
    assert provenance.from_metadata(record_of(tmp_path / "out")) == ()
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["dtype_zoo", "partitioned"])
def test_leaves_that_orbax_cannot_store_are_named_before_anything_is_written(tmp_path, name):
    source = GOLDENS / "tf_bundle" / name
    with pytest.raises(UnsupportedCheckpointError) as raised:
        ot.convert(source, tmp_path / "out")
    with ot.open_checkpoint(source) as opened:
        leaves = dict(opened.leaves)
        bad = [
            name
            for name, view in leaves.items()
            if 0 in view.shape or view.dtype.hasobject or view.dtype == ml_dtypes.uint4
        ]
        assert bad and any(name in str(raised.value) for name in bad)
        assert names_in(tmp_path) == []
        ot.convert(source, tmp_path / "out", on_unsupported="skip")
        assert_equals(
            flat(stock(tmp_path / "out")), {name: view.get() for name, view in leaves.items() if name not in bad}
        )
        skipped = provenance.skipped_from_metadata(record_of(tmp_path / "out"))
        assert skipped == {name: (leaves[name].shape, str(leaves[name].dtype)) for name in bad}


def test_none_and_empty_nodes_stay(tmp_path):
    source = checkpoint({"a/w": np.ones(2)}, empties={"a/none": None, "b": {}, "c": []})
    ot.convert(source, tmp_path / "out")
    restored = stock(tmp_path / "out")
    assert restored["a"]["none"] is None and restored["b"] == {} and restored["c"] == []


def test_empty_nodes_stay_beside_what_transforms_make(tmp_path):
    """As long as some of the leaves beside them are left, and no leaf takes their name."""
    arrays = {"a/w": np.ones(2), "opt/1/mu": np.ones(2)}
    source = checkpoint(arrays, empties={"a/none": None, "b": {}, "c": [], "opt/0": {}, "lone/x": {}})
    cast = [ot.transforms.Cast("a/w", "float16")]
    ot.convert(source, tmp_path / "cast", cast)
    restored = stock(tmp_path / "cast")
    assert restored["opt"]["0"] == {} and restored["b"] == {} and restored["c"] == [] and restored["a"]["none"] is None
    assert jax.tree.structure(ot.restore(source, None, cast)["opt"]) == jax.tree.structure({"0": {}, "1": {"mu": 0}})
    dropped = ot.restore(source, None, [ot.transforms.Drop("opt/.*"), ot.transforms.Rename([("a/w", "b")])])
    assert dropped.keys() == {"a", "b", "c", "lone"} and isinstance(dropped["b"], np.ndarray)


def test_a_name_that_is_also_a_prefix_keeps_its_leaves(tmp_path):
    source = checkpoint({"a": np.ones(2), "a/b": np.zeros(3), "a/c/d": np.ones(1)}, format="tf_bundle")
    ot.convert(source, tmp_path / "out")
    with ot.open_checkpoint(tmp_path / "out") as opened:
        assert {name: view.shape for name, view in opened.leaves.items()} == {"a": (2,), "a/b": (3,), "a/c/d": (1,)}


def parameters():
    return {"dense": {"kernel": np.arange(6.0, dtype=np.float32).reshape(3, 2), "bias": np.ones(2, np.float32)}}


def train_state():
    """Optax's named tuples in tuples, lists in lists, and a dict whose keys are digits."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3), optax.scale(0.1))
    tree = {
        "params": parameters(),
        "opt_state": optimizer.init(parameters()),
        "layers": [{"w": np.ones(1)}, {"w": np.zeros(2)}],
        "nested": [[np.ones(1), {}], (np.ones(2), None, [])],
        "digits": {"0": np.ones(1), "1": np.zeros(1)},
    }
    return jax.tree.map(np.asarray, tree)


def saved(path, tree, **options):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    return path


def keys_of(path):
    """The keys of each leaf with their kinds, as Orbax records them."""
    nodes = json.loads((path / "_METADATA").read_text())["tree_metadata"].values()
    return sorted([(key["key"], key["key_type"]) for key in node["key_metadata"]] for node in nodes)


@pytest.mark.slow
@pytest.mark.parametrize("transforms", [(), tr.Cast("params/.*", "bfloat16")], ids=["as it is", "cast"])
@pytest.mark.parametrize("use_zarr3", [True, False])
def test_stock_orbax_restores_a_copy_into_the_tree_that_was_saved(tmp_path, transforms, use_zarr3):
    tree = train_state()
    source = saved(tmp_path / "source", tree, use_zarr3=use_zarr3)
    ot.convert(source, tmp_path / "copy", transforms)
    assert keys_of(tmp_path / "copy") == keys_of(source)
    assert jax.tree.structure(stock(tmp_path / "copy")) == jax.tree.structure(stock(source))
    for checkpointer, arguments in (
        (ocp.Checkpointer(ocp.StandardCheckpointHandler()), ocp.args.StandardRestore(tree)),
        (ocp.Checkpointer(ocp.PyTreeCheckpointHandler()), ocp.args.PyTreeRestore(tree)),
    ):
        with checkpointer:
            restored = checkpointer.restore(tmp_path / "copy", args=arguments)
        assert jax.tree.structure(restored) == jax.tree.structure(tree)
        jax.tree.map(lambda one, other: np.testing.assert_array_equal(np.asarray(one), other), restored, tree)


def test_sequences_move_with_their_leaves(tmp_path):
    source = saved(tmp_path / "source", {"model": {"layers": [{"w": np.ones(1)}, {"w": np.zeros(2)}], "b": np.ones(3)}})
    ot.convert(source, tmp_path / "moved", tr.Rename([("model/(.*)", r"params/net/\1")]))
    layers = stock(tmp_path / "moved")["params"]["net"]["layers"]
    assert isinstance(layers, list) and [layer["w"].shape for layer in layers] == [(1,), (2,)]
    ot.convert(source, tmp_path / "renamed", tr.Rename([("(.*)/w", r"\1/kernel")]))
    layers = stock(tmp_path / "renamed")["model"]["layers"]
    assert isinstance(layers, list) and [layer["kernel"].shape for layer in layers] == [(1,), (2,)]
    ot.convert({"a": source, "b": source}, tmp_path / "both")
    for layers in (stock(tmp_path / "both")[name]["model"]["layers"] for name in "ab"):
        assert isinstance(layers, list)


@pytest.mark.slow
def test_what_is_no_longer_a_sequence_is_a_dict(tmp_path):
    source = saved(tmp_path / "source", {"l": [np.ones(1), np.zeros(2), np.zeros(2)], "d": {"w": np.ones((2, 3))}})
    cases = {
        "without the first": (tr.Drop("l/0"), {"1", "2"}),
        "named": (tr.Rename([("l/(.)", r"l/x\1")]), {"x0", "x1", "x2"}),
        "exchanged": (tr.Rename([("l/0", "l/2"), ("l/2", "l/0")]), {"0", "1", "2"}),
        "one from elsewhere": ([tr.Drop("l/0"), tr.Rename([("d/w", "l/0")])], {"0", "1", "2"}),
    }
    for name, (transforms, keys) in cases.items():
        ot.convert(source, tmp_path / name, transforms)
        found = stock(tmp_path / name)["l"]
        assert isinstance(found, dict) and found.keys() == keys, name
    ot.convert(source, tmp_path / "unstacked", tr.UnstackLayers("d/(w)", "d/{i}", 0))
    assert stock(tmp_path / "unstacked")["d"].keys() == {"0", "1"}
    ot.convert(source, tmp_path / "without the last", tr.Drop("l/2"))
    assert [leaf.shape for leaf in stock(tmp_path / "without the last")["l"]] == [(1,), (2,)]


def test_a_list_alone_and_what_it_cannot_store(tmp_path):
    source = saved(tmp_path / "source", [np.ones(2), np.zeros(3)])
    ot.convert(source, tmp_path / "copy")
    assert keys_of(tmp_path / "copy") == keys_of(source)
    item = [np.ones(2), np.zeros((0, 2)), np.zeros(3)]
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(tmp_path / "gap", args=ot.args.TrainStateSave(item, on_unsupported="skip"))
    ot.convert(tmp_path / "gap", tmp_path / "gap copy", on_unsupported="skip")
    restored = ot.restore(tmp_path / "gap copy", item)
    assert [leaf.shape for leaf in restored] == [(2,), (0, 2), (3,)]
    assert keys_of(tmp_path / "gap copy") == keys_of(tmp_path / "gap")
