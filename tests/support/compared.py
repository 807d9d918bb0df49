"""Checkpoints to compare: layers, a step and text."""

import numpy as np

TREE = {
    "params": {f"layers_{n}": {"kernel": np.arange(12.0, dtype=np.float32).reshape(3, 4) + n} for n in range(4)},
    "step": 3,
    "text": "words",
}


def changed():
    other = {"params": {f"layers_{n}": {"kernel": np.array(TREE["params"][f"layers_{n}"]["kernel"])} for n in range(4)}}
    return {**other, "step": 3, "text": "words"}
