"""Go on with checkpoints of every version of a model whose code changes.

One list has a named migration for each change and grows at its end.
Each step records the names it has, so that each migration is applied once.
"""

import logging
import tempfile
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

import orbax_t5x as ot

logging.getLogger("orbax_t5x").setLevel(logging.ERROR)
directory = Path(tempfile.mkdtemp())  # yours
T = ot.transforms

# The model as it was at first, and its four changes.

first = {
    "encoder": {"heads": np.arange(6, dtype=np.float32).reshape(2, 3), "norm": np.zeros(3, np.float32)},
    "decoder": {"norm": np.ones(3, np.float32)},
}
changes = [
    ("rename-heads", [T.Rename([("encoder/heads", "encoder/qkv")])]),
    ("split-qkv", [T.Split("encoder/qkv", [f"encoder/{name}" for name in "qkv"], 1)]),
    ("norm-plus-one", [T.Affine(".*/norm", offset=1.0)]),
    ("swap-norms", [T.Rename([("encoder/norm", "decoder/norm"), ("decoder/norm", "encoder/norm")])]),
]

# A run that goes on through all versions: each start passes the list of its day.


def model(version):
    """The names and shapes of a version; the last two changes only change values."""
    norm = np.zeros(3, np.float32)
    heads = [{"heads": (2, 3)}, {"qkv": (2, 3)}, {"q": (2, 1), "k": (2, 1), "v": (2, 1)}][min(version, 2)]
    encoder = {name: np.zeros(shape, np.float32) for name, shape in heads.items()}
    return {"encoder": {**encoder, "norm": norm}, "decoder": {"norm": norm}}


run = directory / "run"
for version in range(len(changes) + 1):
    history = ot.Migrations(changes[:version])
    with ocp.CheckpointManager(run, item_handlers=ot.TrainStateHandler()) as manager:
        start = ot.restore_or_initialize(manager, model(version), transforms=history, init_fn=lambda: first)
        manager.save(version, args=ot.args.TrainStateSave(start.state))

# A step of any version restores with the newest list.

history = ot.Migrations(changes)
target = model(len(changes))
newest = ot.restore(run, target)
for version in range(len(changes) + 1):
    plan = ot.plan_restore(run / str(version), target, history)
    state = plan.execute()
    equal = all(np.array_equal(state["encoder"][name], newest["encoder"][name]) for name in newest["encoder"])
    print(f"step {version}: {plan.migrations}; equal to the newest: {equal}")

# All migrations are applied to a checkpoint without a record. If it has some of them, `since` says so.

stock = ocp.StandardCheckpointer()
stock.save(directory / "stock-0", first)
stock.save(directory / "stock-3", ot.restore(run / "3", None))
stock.close()
print("stock-0:", ot.plan_restore(directory / "stock-0", target, history).migrations)
plan = ot.plan_restore(directory / "stock-3", target, history.since("norm-plus-one"))
print("stock-3:", plan.migrations)
