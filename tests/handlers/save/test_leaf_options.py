"""Options of single leaves in Orbax's form."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from tests.support.point_handlers import save


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


@pytest.mark.slow
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
