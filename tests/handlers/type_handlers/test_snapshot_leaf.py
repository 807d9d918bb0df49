"""Arrays in memory are saved as they are when an asynchronous save begins."""

import jax
import numpy as np
import orbax.checkpoint as ocp

import orbax_t5x as ot
from tests.support.saving import stock


def test_views_of_arrays_in_memory_are_computed_before_an_async_save_returns(tmp_path):
    source = {f"layers_{i}": {"w": np.full((2, 3), i, np.float32)} for i in range(3)}
    stack = ot.transforms.StackLayers(r"layers_(?P<i>\d+)/(.*)", r"layers/\2", 1)
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(source, transforms=[stack]))
        expected = np.stack([source[f"layers_{i}"]["w"] for i in range(3)], 1)
        for leaf in jax.tree.leaves(source):
            leaf[...] = -1
        manager.wait_until_finished()
    np.testing.assert_array_equal(stock(tmp_path / "0" / "default")["layers"]["w"], expected)


def test_an_async_save_copies_before_it_returns(tmp_path):
    state = {"a": np.arange(100_000, dtype=np.float32)}
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(state))
        state["a"][...] = -1
        manager.wait_until_finished()
    np.testing.assert_array_equal(stock(tmp_path / "0" / "default")["a"], np.arange(100_000))
