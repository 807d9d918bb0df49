"""The end of a save: a full disk and a failure leave nothing."""

import os

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.handlers.save import commit
from tests.support.saving import data_files, run


def test_a_disk_that_is_full_is_one_typed_error_and_leaves_room(tmp_path, monkeypatch):
    """Real ENOSPC: the handler writes into a file-size limit, which the system reports as any other failing write."""
    code = f"""
        import errno, os, resource, signal, sys
        os.environ["JAX_PLATFORMS"] = "cpu"
        import numpy as np, orbax.checkpoint as ocp, orbax_t5x as ot
        from orbax_t5x.errors import CheckpointIOError
        root = {str(tmp_path)!r}
        big = np.random.default_rng(0).integers(0, 255, 4 << 20, np.uint8)
        with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
            manager.save(0, args=ot.args.TrainStateSave({{"a": np.ones(3)}}))
            manager.wait_until_finished()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
            try:
                manager.save(1, args=ot.args.TrainStateSave({{"a": big}}))
                manager.wait_until_finished()
            except CheckpointIOError as error:
                print("errno", errno.errorcode[error.errno])
            print([name for folder, _, names in os.walk(root) if ".orbax-checkpoint-tmp" in folder for name in names])
            manager.save(2, args=ot.args.TrainStateSave({{"a": np.ones(3)}}))
            manager.wait_until_finished()
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            manager.save(3, args=ot.args.TrainStateSave({{"a": big}}))
            manager.wait_until_finished()
            print(manager.all_steps(), (manager.restore(3)["a"] == big).all())
    """
    assert run(code) == ["errno EFBIG", "['_CHECKPOINT_METADATA']", "[0, 2, 3] True"]
    assert sorted(os.listdir(tmp_path)) == ["0", "2", "3"]


def test_a_failing_finalize_leaves_nothing(tmp_path, monkeypatch):
    handler = ot.TrainStateHandler()

    def full(directory):
        raise OSError(28, "No space left on device", str(directory))

    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        monkeypatch.setattr(handler._orbax, "finalize", full)
        with pytest.raises(CheckpointIOError, match="No space left") as raised:
            manager.save(0, args=ot.args.TrainStateSave({"a": np.ones(2)}))
            manager.wait_until_finished()
        assert raised.value.errno == 28
        assert data_files(tmp_path) == []
        monkeypatch.undo()
        manager.save(0, args=ot.args.TrainStateSave({"a": np.ones(2)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [0]


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_ocdbt": False, "use_zarr3": True}])
def test_files_that_tensorstore_has_synced_are_not_synced_again(tmp_path, monkeypatch, options):
    synced = []
    monkeypatch.setattr(commit, "sync_path", lambda path: synced.append(os.path.relpath(path, tmp_path / "item")))
    with ocp.Checkpointer(ot.TrainStateHandler(**options)) as checkpointer:
        checkpointer.save(tmp_path / "item", ot.args.TrainStateSave({"a": np.ones(3), "b": np.ones(5)}))
    synced = {os.path.relpath(path, next(one for one in synced if one.endswith("tmp"))) for path in synced}
    folders = {os.path.relpath(folder, tmp_path / "item") for folder, _, _ in os.walk(tmp_path / "item")}
    files = {path for path in synced if (tmp_path / "item" / path).is_file()}
    assert folders <= synced
    assert {"_METADATA", "_CHECKSUMS.json"} <= files
    assert not [path for path in files if path.startswith(("a/", "b/", "d/", "ocdbt"))]
