"""Adafactor's and Adam's leaves for the trees of relatives, by NumPy: each parameter's values stand for its squared
gradient, and means are over the dimensions that T5X's rules for Flaxformer's logical axes have.
"""

from __future__ import annotations

import re

import numpy as np

_PLACEHOLDER = np.zeros(1, np.float32)
# The part of each dimension: R row, C column, B batch. embed and mlp_embed are rows, expert and layers batch.
_SPECS = (
    (r"/expert/wi(_\d)?/", "BRC"),
    (r"/expert/wo/", "BCR"),
    (r"/kv_fused/", "RBCC"),
    (r"/wi_fused/", "RCC"),
    (r"/(query|key|value)/", "RC", "RCC"),
    (r"attention/out/", "CR", "CCR"),
    (r"/wi(_\d)?/", "RC"),
    (r"/wo/", "CR"),
)
# Neither these nor what has one dimension beside the layers are factored.
_WHOLE = re.compile(r".*(/scale|/rel_embedding|/router_weights/w/kernel)")


def _averaged(name, shape):
    """The dimensions over which v_row and v_col are means; None where the second moment is whole."""
    if _WHOLE.fullmatch(name):
        return None
    if len(shape) == 2:
        smaller, larger = (int(dim) for dim in np.argsort(shape, kind="stable"))
        return (larger,), (smaller,)
    stacked = re.search(r"(encoder|decoder)/\1/", name) is not None
    for pattern, *specs in _SPECS:
        if re.search(pattern, f"/{name}"):
            spec = next(one for one in specs if len(one) == len(shape) - stacked)
            spec = spec[:1] + "B" + spec[1:] if stacked else spec
            return tuple(tuple(dim for dim, part in enumerate(spec) if part == one) for one in "CR")
    raise AssertionError(name)


def adafactor(tree):
    """T5X's slots of every parameter."""
    slots = {}
    for name, value in tree.items():
        means = _averaged(name, value.shape)
        kinds = {"m": value, "v": value, "v_row": _PLACEHOLDER, "v_col": _PLACEHOLDER}
        if means is not None:
            rows, columns = (value.mean(dims, dtype=np.float64).astype(np.float32) for dims in means)
            kinds = {"m": value, "v": _PLACEHOLDER, "v_row": rows, "v_col": columns}
        slots |= {f"state/param_states/{name}/{kind}": array for kind, array in kinds.items()}
    return {**slots, "state/step": np.int32(7)}


def adam(tree):
    """Optax's leaves, as T5X's wrapper has them."""
    moments = {}
    for add, kind in enumerate(("mu", "nu"), 1):
        moments |= {f"state/param_states/0/{kind}/{name}": value + add for name, value in tree.items()}
    return {**moments, "state/param_states/0/count": np.int32(7), "state/step": np.int32(7)}
