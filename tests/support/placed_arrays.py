"""Values, and targets over a mesh of this process's devices."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def mesh(shape=(8,), names=("x",)):
    return Mesh(np.asarray(jax.devices()).reshape(shape), names)


REPLICATED = P()


def sharded(shape, dtype=np.float32, spec=REPLICATED, on=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on if on is not None else mesh(), spec))


def values(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


SPECS = {"rows": P("x"), "columns": P(None, "x"), "replicated": P()}
