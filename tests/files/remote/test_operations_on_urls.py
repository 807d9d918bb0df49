"""Everything that takes a path takes a URL: restore, convert, the handler's `source=`, a Checkpointer, the commands."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.cli.main import main
from tests.support.http_store import serving

W = np.arange(64, dtype=np.float32).reshape(8, 8)
TARGET = {"w": jax.ShapeDtypeStruct(W.shape, jnp.float32)}


@pytest.fixture
def url(tmp_path):
    (tmp_path / "served").mkdir()
    safetensors.numpy.save_file({"w": W}, tmp_path / "served" / "model.safetensors")
    with serving(tmp_path / "served") as store:
        yield f"{store.url}/model.safetensors"


def test_a_source_among_several(url):
    restored = ot.restore({"a": url, "b": ot.Source(url)}, {"a": TARGET, "b": TARGET})
    np.testing.assert_array_equal(restored["a"]["w"], W)
    np.testing.assert_array_equal(restored["b"]["w"], W)


def test_the_handlers_source(url, tmp_path):
    handler = ot.TrainStateHandler()
    with ocp.CheckpointManager(tmp_path / "root", item_handlers=handler) as manager:
        manager.save(0, args=ot.args.TrainStateSave({"w": jnp.zeros((8, 8))}))
        manager.wait_until_finished()
        restored = manager.restore(0, args=ot.args.TrainStateRestore(TARGET, source=url))
        np.testing.assert_array_equal(restored["w"], W)
    (tmp_path / "any").mkdir()
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        restored = checkpointer.restore(tmp_path / "any", args=ot.args.TrainStateRestore(TARGET, source=url))
    np.testing.assert_array_equal(restored["w"], W)


def test_convert(url, tmp_path):
    ot.convert(url, tmp_path / "converted")
    np.testing.assert_array_equal(ot.restore(tmp_path / "converted", None)["w"], W)


def test_diff(url, tmp_path):
    safetensors.numpy.save_file({"w": W + 1}, tmp_path / "other.safetensors")
    assert ot.diff(url, url).equal
    (leaf,) = ot.diff(url, tmp_path / "other.safetensors").leaves
    assert (leaf.status, leaf.differing, leaf.absolute.value) == ("values", 64, 1.0)


def test_a_train_state_over_eight_devices(url):
    """Each device's rows are read once, all of them over one connection's requests."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    restored = ot.restore(url, {"w": jax.ShapeDtypeStruct(W.shape, jnp.float32, sharding=sharding)})
    assert restored["w"].sharding == sharding
    np.testing.assert_array_equal(restored["w"], W)


def test_the_commands(url, tmp_path, capsys):
    assert main(["inspect", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "safetensors"
    assert main(["plan", url]) == 0
    assert main(["convert", url, str(tmp_path / "converted")]) == 0
    np.testing.assert_array_equal(ot.restore(tmp_path / "converted", None)["w"], W)
    assert main(["inspect", url.replace("model", "nothing")]) == 1
    assert "nothing.safetensors" in capsys.readouterr().err
