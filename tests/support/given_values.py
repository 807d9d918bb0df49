"""Values given to a target by each of the ways to give one."""

import jax
import numpy as np

import orbax_t5x as ot
from tests.support.memory_checkpoint import checkpoint


def given_by(how, value):
    """(source, transforms, keywords) by which a target leaf `k` gets a value."""
    source = checkpoint({"other": np.zeros(1, np.float32)})
    keep = [ot.transforms.Drop(["other"])]
    if how == "transform":
        return source, [lambda state, target: {"k": value}], {}
    if how == "merge":
        return source, [*keep, ot.transforms.Merge({"k": value})], {}
    if how == "tree":
        return source, keep, {"fallback": {"k": value}, "fallback_for": [".*"]}
    return source, keep, {"fallback": lambda: {"k": value}, "fallback_for": [".*"]}


def key(shape=(), impl="threefry2x32"):
    return jax.random.split(jax.random.key(5, impl=impl), shape) if shape else jax.random.key(5, impl=impl)
