"""Items of an early Orbax, whose values lie in a msgpack file: against Orbax reading them."""

import shutil

import jax
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError
from orbax_t5x.testing.leaf_reads import assert_same


@pytest.fixture(params=["aggregate_some", "aggregate_all"])
def item(request, goldens, tmp_path):
    return shutil.copytree(goldens / "orbax_aggregate" / f"{request.param}.checkpoint", tmp_path / request.param)


@pytest.mark.parametrize("described", [True, False])
def test_orbaxs_own_fixtures(item, described):
    """The first versions wrote no `_METADATA`."""
    if not described:
        (item / "_METADATA").unlink()
    leaves = jax.tree_util.tree_flatten_with_path(ocp.PyTreeCheckpointer().restore(item))[0]
    stock = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(value) for path, value in leaves}
    for format in (None, "orbax"):
        with ot.open_checkpoint(item, format=format) as checkpoint:
            assert checkpoint.format == "orbax"
            assert checkpoint.leaves.keys() == stock.keys()
            for name, value in stock.items():
                assert_same(checkpoint.leaves[name].get(), value)
            views = list(checkpoint.leaves.values())
        for view in views:
            with pytest.raises(ValueError, match="closed"):
                view.get()
    restored = ot.restore(item, {"c": {"a": np.zeros((2, 4), stock["c/a"].dtype)}}, strict=False)
    assert_same(restored["c"]["a"], stock["c/a"])


ERAS = ("0.1.8", "0.2.7", "0.4.1", "0.5.3", "0.6.4", "0.11.6")


@pytest.mark.parametrize("name", ["run", "run/3", "run/3/default", "aggregate"])
@pytest.mark.parametrize("era", ERAS)
def test_steps_and_items_of_orbaxs_eras(goldens, era, name):
    """Written by that version; see `goldens/orbax_eras/generate.py`."""
    expected = {
        "params": {"dense": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(3, np.float16)}},
        "opt": {"0": np.arange(4, dtype=np.int8), "1": None, "2": {}},
        "step": 7,
    }
    if era not in ("0.1.8", "0.2.7"):
        expected["note"] = np.array(b"of its era", object)
    path = goldens / "orbax_eras" / era / name
    restored = ot.restore(path, None)
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for mine, value in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(mine, value)
        assert isinstance(value, int) or mine.dtype == value.dtype
    with ot.open_checkpoint(path) as checkpoint:
        assert (checkpoint.format, checkpoint.step) == ("orbax", None if name == "aggregate" else 3)
    if name == "run":
        assert ot.latest_step(path) == 3


def test_folders_of_early_items_that_have_steps_names_are_steps(item, tmp_path):
    (item / "_METADATA").unlink()
    shutil.copytree(item, tmp_path / "run_3" / "checkpoint_2")
    with ot.open_checkpoint(tmp_path / "run_3") as checkpoint:
        assert (checkpoint.path, checkpoint.step) == (str(tmp_path / "run_3" / "checkpoint_2"), 2)


def test_early_items_side_by_side_are_no_step(item, tmp_path):
    (item / "_METADATA").unlink()
    for name in ("one", "other"):
        shutil.copytree(item, tmp_path / "runs" / name)
    with pytest.raises(CheckpointNotFoundError, match="a directory of checkpoints: 'one', 'other'; open one"):
        ot.open_checkpoint(tmp_path / "runs")


def test_a_root_of_such_steps(item, tmp_path):
    (item / "_METADATA").unlink()
    root = tmp_path / "root"
    shutil.copytree(item, root / "checkpoint_7")
    with ot.open_checkpoint(root) as checkpoint:
        assert (checkpoint.format, checkpoint.step) == ("orbax", 7)


def test_a_train_state_is_not_taken_for_t5xs(goldens, tmp_path):
    """T5X's names at the top, and placeholders of Orbax."""
    item = shutil.copytree(goldens / "orbax_aggregate" / "aggregate_some.checkpoint", tmp_path / "item")
    (item / "_METADATA").unlink()
    tree = {"target": {"a": "PLACEHOLDER://a", "n": 3}, "state": {"none": None}}
    (item / "checkpoint").write_bytes(msgpack.packb(tree))
    with ot.open_checkpoint(item) as checkpoint:
        assert checkpoint.format == "orbax"
        assert list(checkpoint.leaves) == ["target/a", "target/n"]
        assert checkpoint.leaves["target/n"].get() == 3
        assert checkpoint.tree()["state"] == {"none": None}
        with ot.open_checkpoint(goldens / "orbax_aggregate" / "aggregate_some.checkpoint") as whole:
            assert_same(checkpoint.leaves["target/a"].get(), whole.leaves["a"].get())


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        ({"a": "PLACEHOLDER:///etc"}, UnsafeCheckpointError),
        ({"a": "PLACEHOLDER://../outside"}, UnsafeCheckpointError),
        ({"a": "PLACEHOLDER://b", "b": "PLACEHOLDER://b"}, CorruptCheckpointError),
        ({"a": "PLACEHOLDER://missing"}, CorruptCheckpointError),
    ],
)
def test_placeholders(goldens, tmp_path, tree, kind):
    item = shutil.copytree(goldens / "orbax_aggregate" / "aggregate_some.checkpoint", tmp_path / "item")
    (item / "_METADATA").unlink()
    (item / "checkpoint").write_bytes(msgpack.packb(tree))
    with pytest.raises(kind) as caught, ot.open_checkpoint(item) as checkpoint:
        checkpoint.leaves["a"].get()
    assert caught.value.leaf in tree


def test_a_damaged_msgpack_file_leaves_the_arrays(goldens, tmp_path):
    item = shutil.copytree(goldens / "orbax_aggregate" / "aggregate_some.checkpoint", tmp_path / "item")
    metadata = (item / "_METADATA").read_text()
    assert '"skip_deserialize": true' in metadata
    for damage in (lambda path: path.write_bytes(b"\x85"), lambda path: path.unlink()):
        damage(item / "checkpoint")
        with ot.open_checkpoint(item) as checkpoint:
            assert checkpoint.leaves["a"].get().size
            with pytest.raises(CorruptCheckpointError) as caught:
                checkpoint.leaves["c/a"].get()
            assert caught.value.leaf == "c/a"


def test_the_file_alone_says_where_its_arrays_are(goldens):
    path = goldens / "orbax_aggregate" / "aggregate_some.checkpoint" / "checkpoint"
    with pytest.raises(ot.errors.UnsupportedCheckpointError, match="arrays of this file are beside it"):
        ot.open_checkpoint(path)
