"""Steps of a run that starts again: who saved them, what they record, how they are damaged."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp

import orbax_t5x as ot

T = ot.transforms
SWAP = T.Rename([("x", "y"), ("y", "x")])
OTHER = T.Rename([("y", "z"), ("z", "y")])
SOURCE = {name: np.full(8, value, np.float32) for name, value in (("x", 1), ("y", 2), ("z", 3))}
SWAPPED = {"x": 2.0, "y": 1.0, "z": 3.0}
STATE = {name: np.full(8, value, np.float32) for name, value in SWAPPED.items()}


def initial():
    return {name: jax.random.normal(jax.random.key(seed), (8,)) for seed, name in enumerate(SOURCE)}


def values(state):
    return {name: float(array[0]) for name, array in state.items()}


def ours(root, **options):
    return ocp.CheckpointManager(
        root, options=ocp.CheckpointManagerOptions(**options), item_handlers=ot.TrainStateHandler()
    )


def our_args(state):
    return ot.args.TrainStateSave(state)


def recorded(step_item):
    metadata = json.loads((step_item / "_METADATA").read_text())
    return metadata["custom_metadata"]["orbax_t5x"]["provenance"]


def cut(file):
    """Half of a file, as a full disk leaves it."""
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def largest(item):
    """The largest data file of an item; what each process wrote beside may be read by nobody after the merge."""
    return max(item.glob("d/*"), key=lambda file: file.stat().st_size)


def cut_data(item):
    cut(largest(item))


def flip_a_bit(item):
    data = bytearray(largest(item).read_bytes())
    data[len(data) // 2] ^= 1
    largest(item).write_bytes(data)
