"""Lazy arrays are written in chunks that tile them, within the limit, also through a manager in the background."""

from unittest import mock

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.lazy import chunks
from tests.support.memory_checkpoint import AwaitedLeaf, FailingLeaf, checkpoint
from tests.support.saving import data_files, stock


@pytest.mark.slow
@settings(max_examples=15)
@given(st.data())
def test_streamed_arrays_equal_numpy_for_any_chunking(tmp_path_factory, data):
    dtype = data.draw(
        st.sampled_from([np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(bool), np.dtype(ml_dtypes.int4)])
    )
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))  # each chunk waits for a disk
    stored = tuple(data.draw(st.integers(1, size)) for size in shape) if data.draw(st.booleans()) else None
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    leaf = AwaitedLeaf("w", array, stored)
    directory = tmp_path_factory.mktemp("c") / "out"
    limit = data.draw(st.integers(1, 4000))
    with mock.patch.object(chunks, "LEAST_BLOCK_BYTES", 1):
        ot.convert(checkpoint({"w": leaf, "v": array[..., None]}), directory, memory_limit_bytes=limit)
    restored = stock(directory)
    assert restored["w"].dtype == dtype
    np.testing.assert_array_equal(restored["w"], array)
    np.testing.assert_array_equal(restored["v"], array[..., None])
    assert sum(int(np.prod([b - a for a, b in box])) for box in leaf.boxes) == array.size


@pytest.mark.slow
def test_lazy_leaves_save_through_a_manager_in_the_background(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "LEAST_BLOCK_BYTES", 1)
    source = checkpoint({"w": np.arange(4096.0).reshape(64, 64), "v": np.ones(3, np.float32)}, AwaitedLeaf)
    state = {"params": {**source.tree(), "here": jnp.ones(2)}}
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(state, dtype="float32", memory_limit_bytes=4096))
        manager.wait_until_finished()
        restored = manager.restore(0)["params"]
    assert restored["w"].dtype == np.float32
    np.testing.assert_array_equal(restored["w"], np.arange(4096).reshape(64, 64))
    assert restored["here"].sum() == 2


# Orbax cancels its other work on event loops that are closed already.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lazy_leaf_that_fails_in_the_background_leaves_nothing(tmp_path):
    failing = FailingLeaf("w", np.ones(3), CorruptCheckpointError("damaged", path="/p", leaf="w"))
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        with pytest.raises(CorruptCheckpointError, match="damaged"):
            manager.save(0, args=ot.args.TrainStateSave(checkpoint({"w": failing, "v": np.ones(2)}).tree()))
            manager.wait_until_finished()
        assert data_files(tmp_path) == []
        manager.save(0, args=ot.args.TrainStateSave({"v": np.ones(2)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [0]
