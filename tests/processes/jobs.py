"""Beginnings of the scripts that several processes run together, and the files that they read."""

import json

import ml_dtypes
import numpy as np

SAFETENSORS_NAMES = {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bool": "BOOL",
    "complex64": "C64",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}

SCRIPT = """
import orbax.checkpoint as ocp
import orbax_t5x as ot
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from orbax_t5x.trees.flat import flatten
from orbax_t5x.restoring import processes

devices = np.asarray(jax.devices())
line = Mesh(devices, ("x",))

def shape_of(path, name):
    with ot.open_checkpoint(path) as checkpoint:
        return checkpoint.leaves[name].shape, checkpoint.leaves[name].dtype

def target_of(path, spec=P(), mesh=line):
    with ot.open_checkpoint(path) as checkpoint:
        sharding = NamedSharding(mesh, spec)
        return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
                for name, leaf in checkpoint.leaves.items()}

def read(path, target, **options):
    plan = ot.plan_restore(path, target, strict=False, **options.pop("plan", {}))
    return plan.execute(**options), plan.report

def bits(array):
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8).tobytes()

def require_equal(path, restored):
    with ot.open_checkpoint(path) as checkpoint:
        for name, array in flatten(restored).items():
            whole = checkpoint.leaves[name].get()
            for shard in array.addressable_shards:
                assert bits(shard.data) == bits(whole[shard.index]), name

def error_of(function):
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error), getattr(error, "__notes__", [])]
    return None
"""


def random_array(rng, dtype, shape):
    """Returns an array of random bits: NaNs with payloads, infinities and subnormal numbers among them."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype)) if isinstance(dtype, str) else np.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)


def write_safetensors(path, arrays):
    """Writes arrays of every dtype of the format; its own package does not write all of them."""
    header, parts, end = {}, [], 0
    for name, array in arrays.items():
        data = array.tobytes()
        dtype = SAFETENSORS_NAMES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [end, end + len(data)]}
        parts.append(data)
        end += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))
    return path
