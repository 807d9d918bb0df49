"""A `CheckpointManager` with our handler on a root in a bucket, `gs://`, on a stand-in of Google's protocol.

Orbax itself makes and lists the directories, by a file system over the same objects.
"""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import orbax_t5x as ot
from tests.support import object_paths
from tests.support.amazon_store import amazon_store
from tests.support.bundle_writer import bundle_of
from tests.support.google_store import GoogleStore

pytestmark = pytest.mark.slow

URL = "gs://bucket/runs/a"
STATE = {"w": jnp.arange(24.0).reshape(4, 6), "step": jnp.int32(0)}
TARGET = jax.eval_shape(lambda: STATE)
RENAMED = {"kernel": TARGET["w"], "step": TARGET["step"]}
RENAME = [ot.transforms.Rename([("w", "kernel")])]


@pytest.fixture
def google(monkeypatch):
    server = GoogleStore()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    object_paths.install(monkeypatch)
    yield server
    server.close()


def manager(**options):
    return ocp.CheckpointManager(
        URL, item_handlers=ot.TrainStateHandler(), options=ocp.CheckpointManagerOptions(**options)
    )


def save(one, *steps):
    for step in steps:
        assert one.save(step, args=ot.args.TrainStateSave({"w": STATE["w"] + step, "step": jnp.int32(step)}))
    one.wait_until_finished()


def test_steps_are_saved_listed_restored_and_deleted(google):
    with manager(max_to_keep=2) as one:
        save(one, 1, 2, 3)
        assert list(one.all_steps()) == [2, 3]
        restored = one.restore(3, args=ot.args.TrainStateRestore(TARGET))
        np.testing.assert_array_equal(restored["w"], STATE["w"] + 3)
    assert ot.latest_step(URL) == ot.latest_step(URL, validated=True) == 3
    assert ot.verify(f"{URL}/3").status == "ok"
    np.testing.assert_array_equal(ot.restore(URL, TARGET)["w"], STATE["w"] + 3)
    # Stock Orbax reads it.
    with ocp.CheckpointManager(URL) as stock:
        assert stock.latest_step() == 3
        restored = stock.restore(2, args=ocp.args.StandardRestore(TARGET))
        np.testing.assert_array_equal(restored["w"], STATE["w"] + 2)


def test_a_save_that_was_not_finished_is_no_step(google):
    with manager() as one:
        save(one, 1, 2)
    for name in ("runs/a/2/commit_success.txt", "runs/a/2/default/commit_success.txt"):
        del google.files[name]
    assert ot.latest_step(URL) == 1
    with manager() as one:
        assert one.latest_step() == 1
        np.testing.assert_array_equal(one.restore(1, args=ot.args.TrainStateRestore(TARGET))["w"], STATE["w"] + 1)


def test_a_run_is_initialized_once_and_resumed(google, tmp_path):
    """Transforms happen once: the record in the bucket's own steps says so."""
    source = bundle_of({"w": np.asarray(STATE["w"]), "step": np.int32(0)}).write(tmp_path)
    with manager() as one:
        state, step, how = ot.restore_or_initialize(one, RENAMED, init_from=source, transforms=RENAME)
        assert (step, how) == (None, "initialized") or how == "initialized"
        np.testing.assert_array_equal(state["kernel"], STATE["w"])
        assert one.save(5, args=ot.args.TrainStateSave(jax.tree.map(lambda array: array + 1, state)))
    with manager() as one:
        state, step, how = ot.restore_or_initialize(one, RENAMED, init_from=source, transforms=RENAME)
        assert (step, how) == (5, "resumed")
        np.testing.assert_array_equal(state["kernel"], STATE["w"] + 1)
        restored = one.restore(5, args=ot.args.TrainStateRestore(RENAMED, transforms=RENAME))
        np.testing.assert_array_equal(restored["kernel"], STATE["w"] + 1)
    with ot.open_checkpoint(f"{URL}/5") as checkpoint:
        assert "Rename" in str(checkpoint.metadata)


def test_a_converted_checkpoint_replaces_none_of_the_directory_objects(google, tmp_path, monkeypatch):
    """Orbax's item with its objects of directories is a checkpoint that may be replaced."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with manager() as one:
        save(one, 1)
    google.files["runs/a/1/default/"] = b""
    ot.convert(f"{URL}/1", "gs://bucket/copy", RENAME)
    assert set(ot.restore("gs://bucket/copy", None)) == {"kernel", "step"}
    ot.convert("gs://bucket/copy", f"{URL}/1/default", overwrite=True)
    assert set(ot.restore(f"{URL}/1/default", None)) == {"kernel", "step"}


def test_orbax_itself_writes_no_root_on_s3():
    """Its arrays would go to a local path of that name; if this fails, `docs/guides/stores.md` can promise more."""
    info = ocp.type_handlers.ParamInfo(
        name="w", parent_dir=epath.Path("s3://bucket/runs/a/1/default"), is_ocdbt_checkpoint=True
    )
    with pytest.raises(ValueError, match="should be absolute"):
        ocp.type_handlers.get_json_tspec_write(
            info, use_ocdbt=True, global_shape=(2,), local_shape=(2,), dtype=np.float32, process_index=0
        )


def test_a_local_root_begins_from_s3(tmp_path, monkeypatch):
    source = bundle_of({"w": np.asarray(STATE["w"]), "step": np.int32(0)}).write(tmp_path)
    with amazon_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        store.upload(source.parent, "bundle")
        url = f"s3://bucket/bundle/{source.name}"
        with ocp.CheckpointManager(tmp_path / "root", item_handlers=ot.TrainStateHandler()) as one:
            state, _, how = ot.restore_or_initialize(one, RENAMED, init_from=url, transforms=RENAME)
            assert how == "initialized"
            np.testing.assert_array_equal(state["kernel"], STATE["w"])
            save(one, 1)
            args = ot.args.TrainStateRestore(RENAMED, transforms=RENAME, source=url)
            np.testing.assert_array_equal(one.restore(1, args=args)["kernel"], STATE["w"])
