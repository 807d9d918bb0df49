"""What is used of Orbax beyond its documented interface is there, and means what `handlers.orbax_names` takes it for.

A failure here after a new version of Orbax says which name has moved.
"""

from __future__ import annotations

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from etils import epath

from orbax_t5x.handlers.checkpoint_handler import TrainStateHandler
from orbax_t5x.handlers.orbax_names import TEMPORARY_MARK, CommitFuture, processes_of, step_directory, write_spec
from orbax_t5x.readers.orbax import steps


class Recorder(ocp.PyTreeCheckpointHandler):
    """Notes the directories that Orbax passes to a handler while it saves."""

    def __init__(self):
        super().__init__()
        self.directories = []

    def save(self, directory, *args, **kwargs):
        self.directories.append(directory.name)
        super().save(directory, *args, **kwargs)


def test_orbax_saves_into_directories_with_the_mark(tmp_path):
    recorder = Recorder()
    with ocp.Checkpointer(recorder) as checkpointer:
        checkpointer.save(tmp_path / "item", {"a": np.ones(2)})
    assert len(recorder.directories) == 1
    assert TEMPORARY_MARK in recorder.directories[0]
    assert not any(TEMPORARY_MARK in entry.name for entry in tmp_path.iterdir())


def test_reading_and_writing_know_the_same_mark():
    # Readers never import Orbax, so they have the text of their own.
    assert steps.TEMPORARY_MARK == TEMPORARY_MARK


def test_the_function_for_specs_that_is_to_be_removed_is_still_there():
    """Orbax's source says to replace it by one that none of its public modules exports."""
    assert hasattr(ocp.type_handlers, "get_json_tspec_write"), "handlers.orbax_names.write_spec needs another one"


@pytest.mark.parametrize("use_zarr3", [False, True])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.int8)])
def test_what_is_written_by_the_spec_is_read_by_orbaxs_own(tmp_path, use_zarr3, dtype):
    context = ts.Context()
    info = ocp.type_handlers.ParamInfo(
        name="a.b", parent_dir=epath.Path(tmp_path), is_ocdbt_checkpoint=False, use_zarr3=use_zarr3, ts_context=context
    )
    array = np.arange(24).reshape(4, 6).astype(dtype)
    spec = write_spec(info, array.shape, (2, 3), array.dtype)
    store = ts.open(ts.Spec(spec), create=True, open=True, context=context).result()
    assert store.chunk_layout.write_chunk.shape == (2, 3)
    store.write(array).result()
    stock = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=False)
    np.testing.assert_array_equal(ts.open(ts.Spec(stock), open=True, context=context).result().read().result(), array)


def test_each_process_writes_a_database_of_its_own(tmp_path):
    info = ocp.type_handlers.ParamInfo(
        name="a", parent_dir=epath.Path(tmp_path), is_ocdbt_checkpoint=True, ts_context=ts.Context()
    )
    spec = write_spec(info, (4,), (2,), np.dtype(np.float32))
    assert spec["kvstore"]["driver"] == "ocdbt"
    assert "ocdbt.process_0" in str(spec["kvstore"]["base"])


@pytest.mark.parametrize("fails", [False, True])
def test_a_commit_future_runs_its_coroutine_and_raises_its_errors(fails):
    ran = []

    async def commit():
        ran.append(True)
        if fails:
            raise ValueError("not written")

    future = CommitFuture(commit(), name="commit")
    if fails:
        with pytest.raises(ValueError, match="not written"):
            future.result(timeout=800)
    else:
        future.result(timeout=800)
    assert ran == [True]


def test_parameters_wait_for_their_directory():
    assert callable(ocp.type_handlers.ParamInfo.await_path_creation)


def test_a_manager_knows_where_its_steps_are(tmp_path):
    options = ocp.CheckpointManagerOptions(step_prefix="run", step_format_fixed_length=8)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(3, args=ocp.args.StandardSave({"a": np.ones(2)}))
        manager.wait_until_finished()
        assert step_directory(manager, 3) == epath.Path(tmp_path / "run_00000003")


def test_the_recorded_type_is_orbaxs_and_the_registered_one_ours():
    assert TrainStateHandler().typestr() == ocp.PyTreeCheckpointHandler.typestr()
    assert TrainStateHandler.typestr().endswith(".TrainStateHandler")


def test_a_manager_has_the_options_of_its_processes(tmp_path):
    processes = ocp.options.MultiprocessingOptions(active_processes={0}, barrier_sync_key_prefix="x")
    options = ocp.CheckpointManagerOptions(multiprocessing_options=processes, create=False)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        assert processes_of(manager) == processes
