"""Writes the steps and items of one Orbax version: `python generate.py FOLDER`, with that version installed.

The same tree each time: in the step of a manager, and in an item whose values lie in one msgpack file. Versions from
0.4 on stored strings, each in its own way.
"""

import os
import shutil
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp

TREE = {
    "params": {"dense": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(3, np.float16)}},
    "opt": [np.arange(4, dtype=np.int8), None, {}],
    "step": 7,
}


def main(folder: str) -> None:
    version = tuple(map(int, ocp.__version__.split(".")[:2])) if hasattr(ocp, "__version__") else (0, 4)
    has_strings = version >= (0, 4)
    root = os.path.abspath(folder)
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(f"{root}/run")
    tree = {**TREE, "note": "of its era"} if has_strings else TREE
    manager = ocp.CheckpointManager(f"{root}/run", ocp.Checkpointer(ocp.PyTreeCheckpointHandler()))
    manager.save(3, tree)
    getattr(manager, "wait_until_finished", lambda: None)()
    together = jax.tree_util.tree_map(lambda value: ocp.SaveArgs(aggregate=True), tree)
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(f"{root}/aggregate", tree, save_args=together)


if __name__ == "__main__":
    main(sys.argv[1])
