"""What the tree of a conversion is: never empty, and with the lists and tuples of an Orbax source."""

import json

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x import transforms as tr


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


def stock(path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path)


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
