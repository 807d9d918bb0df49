"""A Grain iterator's state beside a train state, under both of Orbax's managers: what a restart continues with.

Grain is no dependency: install it (`pip install grain`) and run `python -m benchmarks.grain_items`. It checks that the
elements after a restart are those that an iterator gives that was not stopped, and that the train state is ours.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import grain
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import v1 as ocp_v1

import orbax_t5x as ot

TARGET = {"w": np.zeros(3, np.float32)}


def iterator():
    """Makes the iterator of a job; a restart makes it anew."""
    return iter(grain.MapDataset.range(100).shuffle(seed=1).batch(4).to_iter_dataset())


def elements(data, count):
    """Takes elements from an iterator."""
    return [next(data).tolist() for _ in range(count)]


def version_0(root: Path) -> None:
    """`CheckpointManager`: Grain's handler has an item of its own."""
    handlers = {"state": ot.TrainStateHandler(), "data": grain.checkpoint.CheckpointHandler()}
    data = iterator()
    elements(data, 3)
    with ocp.CheckpointManager(root, item_handlers=handlers) as manager:
        state = ot.args.TrainStateSave({"w": jnp.ones(3)})
        manager.save(1, args=ocp.args.Composite(state=state, data=grain.checkpoint.CheckpointSave(data)))
    expected, again = elements(data, 3), iterator()
    with ocp.CheckpointManager(root, item_handlers=handlers) as manager:
        state, step, how = ot.restore_or_initialize(manager, TARGET, item="state")
        assert (step, how) == (1, "resumed") and state["w"].sum() == 3
        manager.restore(step, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(again)))
    assert elements(again, 3) == expected


def version_1(root: Path) -> None:
    """v1's `Checkpointer`: an iterator saves and loads itself."""
    data = iterator()
    elements(data, 3)
    with ot.v1.context(), ocp_v1.training.Checkpointer(root) as checkpointer:
        checkpointer.save_checkpointables(1, {"state": {"w": jnp.ones(3)}, "data": data})
    expected, again = elements(data, 3), iterator()
    with ot.v1.context(), ocp_v1.training.Checkpointer(root) as checkpointer:
        state, step, how = ot.restore_or_initialize(checkpointer, TARGET, item="state")
        assert (step, how) == (1, "resumed") and state["w"].sum() == 3
        checkpointer.load_checkpointables(step, {"data": again})
    assert elements(again, 3) == expected
    assert ot.verify(root / "1" / "state").status == "ok"


if __name__ == "__main__":
    for run in (version_0, version_1):
        with tempfile.TemporaryDirectory() as directory:
            run(Path(directory) / "run")
        print(run.__name__, "continues with the same elements")
