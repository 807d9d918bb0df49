"""The table of type handlers that saves use."""

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot


class Subclass(ot.TrainStateHandler):
    def __init__(self):
        super().__init__(use_ocdbt=False)


@pytest.mark.parametrize("handler", [ot.TrainStateHandler, Subclass])
def test_a_registry_that_is_given_the_class(tmp_path, handler):
    """Orbax then makes a handler for each kind of arguments: what one recorded, the other must know."""
    made = ocp.handlers.DefaultCheckpointHandlerRegistry()
    made.add(None, ot.args.TrainStateSave, handler)
    made.add(None, ot.args.TrainStateRestore, handler)
    rename = ot.transforms.Rename([("a", "b")])
    with ocp.CheckpointManager(tmp_path, handler_registry=made) as manager:
        manager.save(0, args=ot.args.TrainStateSave({"a": np.ones(2)}, provenance=()))
        manager.wait_until_finished()
        restored = manager.restore(0, args=ot.args.TrainStateRestore({"b": np.zeros(2)}, [rename]))
        manager.save(1, args=ot.args.TrainStateSave(restored))
        manager.wait_until_finished()
        again = manager.restore(1, args=ot.args.TrainStateRestore({"b": np.zeros(2)}, [rename]))
    np.testing.assert_array_equal(again["b"], np.ones(2))
    with ot.open_checkpoint(tmp_path / "1") as checkpoint:
        assert checkpoint.metadata["custom_metadata"]["orbax_t5x"]["provenance"][-1]["digest"]
