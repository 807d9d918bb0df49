"""T5 networks in each layout and the packs between them."""

import dataclasses

import jax
import numpy as np

from orbax_t5x import rules
from orbax_t5x.testing.transform_suite import as_numpy
from tests.support import t5_model

MINIMAL = t5_model.T5Config(encoder_layers=3, decoder_layers=2)
LAYOUTS = {
    "minimal": MINIMAL,
    "unscanned": dataclasses.replace(MINIMAL, split_heads=True, per_layer_bias=True),
    "scanned": dataclasses.replace(MINIMAL, scan_layers=True),
}
HEADS = (MINIMAL.heads, MINIMAL.head_dim)
PACKS = {
    ("minimal", "scanned"): rules.t5_minimal_to_scanned(*HEADS),
    ("minimal", "unscanned"): rules.t5_minimal_to_unscanned(*HEADS),
    ("unscanned", "scanned"): rules.t5_unscanned_to_scanned(),
}


def full(params):
    return {"target": jax.tree.map(np.asarray, params)}


def as_pytorch(leaves):
    """The names and orientation that Transformers gives the same parameters in PyTorch: a Linear is transposed."""
    values = {}
    for name, lazy in leaves.items():
        module, kind = name.rpartition("/")[::2]
        value = as_numpy(lazy)
        values[f"{module.replace('/', '.')}.weight"] = value.T if kind == "kernel" else value
    return values
