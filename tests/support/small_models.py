"""Small models and train states by name, and values for what is new in them."""

import jax
import numpy as np
import optax
from flax import serialization

from orbax_t5x.trees.flat import flatten, unflatten

FILL = 7.5


def array(name, *shape, dtype=np.float32):
    seed = np.frombuffer(name.encode(), np.uint8).astype(np.uint32)
    return np.random.default_rng(seed).integers(1, 1 << 16, shape).astype(dtype)


def model(depth=2, vocab=12, width=4, *, norms=("norm_a", "norm_b"), head=3, experts=False):
    """A small transformer's parameters by name."""
    leaves = {"embed/embedding": (vocab, width), "final/scale": (width,)}
    for layer in range(depth):
        at = f"layers_{layer}"
        leaves |= {f"{at}/attention/{one}/kernel": (width, width + 1) for one in ("query", "key", "value")}
        leaves |= {f"{at}/{norm}/scale": (width,) for norm in norms}
        leaves |= {f"{at}/mlp/wi/kernel": (width, 9), f"{at}/mlp/wo/kernel": (9, width)}
    leaves |= {"head/kernel": (width, head), "head/bias": (head,)}
    return {name: array(name, *shape) for name, shape in leaves.items()}


def below(prefix, leaves):
    return {f"{prefix}{name}": value for name, value in leaves.items()}


def empty(leaves):
    return unflatten({name: np.zeros_like(value) for name, value in leaves.items()})


def renamed(leaves, **words):
    def new(name):
        return "/".join(words.get(part, part) for part in name.split("/"))

    return {new(name): value for name, value in leaves.items()}


def train_state(params, tx=None, **counts):
    """A state by name, with moments that differ from their parameters."""
    tree = {"params": unflatten(params), "opt_state": (tx or optax.adam(1e-3)).init(unflatten(params)), "step": 0}
    leaves = flatten(serialization.to_state_dict(tree))
    made = {
        name: params[name.removeprefix("params/")]
        if name.startswith("params/")
        else np.full_like(value, 5)
        if np.ndim(value) == 0
        else array(name, *np.shape(value))
        for name, value in leaves.items()
        if value is not None
    }
    return {**made, **counts}


def target_state(params, tx=None):
    """What a state with this optimizer restores into."""
    return {"params": empty(params), "opt_state": (tx or optax.adam(1e-3)).init(empty(params)), "step": 0}


def moved(state, old, new):
    """The state with the parameters below `old` below `new`, moments too."""
    return {name.replace(old, new): value for name, value in state.items()}


def filled(leaf):
    if leaf is None:
        return None
    return np.full(np.shape(leaf), FILL).astype(leaf.dtype) if hasattr(leaf, "dtype") else type(leaf)(FILL)


def fallback_of(target):
    return lambda: jax.tree.map(filled, target)
