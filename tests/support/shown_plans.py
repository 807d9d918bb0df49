"""A plan with every kind of row, and targets for it."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from tests.support.memory_checkpoint import checkpoint

LAYERS = 12


def mesh():
    return Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))


def leaf(shape, spec=None, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=None if spec is None else NamedSharding(mesh(), spec))


def plan_with_every_row():
    """Layers under other names, a cast, a stack, a constant, a fallback, a placeholder, leaves unused and dropped."""
    arrays = {f"encoder/block_{i:03d}/q": np.zeros((8, 16), np.float32) for i in range(LAYERS)}
    arrays |= {f"decoder/block_{i:03d}/q": np.full((4, 8), i, np.float32) for i in range(LAYERS)}
    arrays |= {f"encoder/block_{i:03d}/wi_{j}": np.zeros((8, 32), np.float32) for i in range(LAYERS) for j in range(2)}
    arrays |= {"embedding": np.zeros((64, 8), jax.numpy.bfloat16), "left/over": np.zeros(3), "gone": np.zeros(2)}
    target = {
        "layers": {f"layers_{i}": {"query": leaf((8, 16), P(None, "model"))} for i in range(LAYERS)},
        "wi": {f"layers_{i}": {f"wi_{j}": leaf((8, 32), P("data", "model")) for j in range(2)} for i in range(LAYERS)},
        "stacked": leaf((4, LAYERS, 8), P(None, None, "model")),
        "embedding": leaf((64, 8), P("model")),
        "constant": leaf((2,)),
        "new": leaf((4,), P()),
        "kept": ...,
    }

    def rules(state, target):
        encoder = state.pop("encoder")
        decoder = state.pop("decoder")
        state.pop("gone")
        blocks = range(LAYERS)
        state["layers"] = {f"layers_{i}": {"query": encoder[f"block_{i:03d}"]["q"]} for i in blocks}
        state["wi"] = {
            f"layers_{i}": {f"wi_{j}": encoder[f"block_{i:03d}"][f"wi_{j}"] for j in range(2)} for i in blocks
        }
        state["stacked"] = ot.stack([decoder[f"block_{i:03d}"]["q"] for i in blocks], 1)
        state["constant"] = np.ones(2, np.float32)
        return state

    return ot.plan_restore(checkpoint(arrays), target, rules, strict=False, fallback={"new": np.zeros(4, np.float32)})
