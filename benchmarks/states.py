"""States by name, their shardings over 8 devices of the CPU, and what they occupy: what jobs share.

Importing it sets the environment for JAX, so it comes before JAX. Imports stand inside the functions: what a job
imports is part of what it costs.
"""

from __future__ import annotations

import json
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_DEVICES = 8


def nested(flat):
    """'/'-joined names as nested dicts."""
    root = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return root


def shardings(layout):
    """shape -> sharding: "single" is one device; over 8 devices "rows" splits the first axis, "columns" the last of
    matrices, where 8 divides it, and anything else replicates.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    if layout == "single":
        return lambda shape: SingleDeviceSharding(jax.devices()[0])
    mesh = Mesh(np.asarray(jax.devices()), ("x",))

    def choose(shape):
        if layout == "rows" and shape and shape[0] % _DEVICES == 0:
            return NamedSharding(mesh, PartitionSpec("x"))
        if layout == "columns" and len(shape) >= 2 and shape[-1] % _DEVICES == 0:
            return NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 1), "x"))
        return NamedSharding(mesh, PartitionSpec())

    return choose


def abstract(shapes, layout):
    """Nested ShapeDtypeStructs with shardings from name -> (shape, dtype)."""
    import jax
    import numpy as np

    choose = shardings(layout)
    return nested(
        {
            name: jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype), sharding=choose(tuple(shape)))
            for name, (shape, dtype) in shapes.items()
        }
    )


def read_shapes(path):
    """The names, shapes and dtypes that `note_shapes` wrote beside the checkpoint."""
    with open(str(path) + ".json") as file:
        return json.load(file)


def note_shapes(path, flat):
    """Writes the names, shapes and dtypes of a state beside its checkpoint."""
    with open(path + ".json", "w") as file:
        json.dump({name: (value.shape, str(value.dtype)) for name, value in flat.items()}, file)


def flattened(tree, prefix=""):
    """Nested dicts as '/'-joined names."""
    flat = {}
    for key, value in tree.items():
        name = f"{prefix}/{key}" if prefix else key
        flat.update(flattened(value, name) if isinstance(value, dict) else {name: value})
    return flat


def result_mib(state):
    """Host memory that the result occupies; replicas on CPU devices share one buffer where they were adopted from
    one.
    """
    import jax

    buffers = {}
    for leaf in jax.tree_util.tree_leaves(state):
        for shard in leaf.addressable_shards:
            buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(buffers.values()) / (1 << 20)
