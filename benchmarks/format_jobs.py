"""The jobs that compare each format with its own reader: `python -m benchmarks.format_jobs JOB PATH …`.

Four jobs: what opening costs (all names, shapes and dtypes), a whole restore into a layout (`states.shardings`), the
first eighth of each array along its first axis on one device, and making the checkpoint. Peers are the format's own
readers as their users call them; what they lack (shardings, a part of an array) is added by JAX's own means.
"""

from __future__ import annotations

import math
import sys

from benchmarks.jobs import read_floor
from benchmarks.measure import Clock
from benchmarks.states import abstract, flattened, nested, note_shapes, read_shapes, result_mib, shardings

__all__ = ["read_floor"]

_STEP = 1_000
# What T5X writes for arrays that are not sharded over devices: chunks of at most this many bytes.
_T5X_CHUNK_BYTES = 64 << 20


def eighth(shape):
    """The first eighth of the first axis, at least one row, as an index; of a scalar everything."""
    return (slice(0, max(1, shape[0] // 8)),) if shape else ()


def _eighth_shape(shape):
    return (max(1, shape[0] // 8), *shape[1:]) if shape else ()


# -- ours


def open_ours(clock, path):
    """`ot.open_checkpoint`, and a look at every shape."""
    import orbax_t5x as ot

    open_checkpoint = ot.open_checkpoint
    clock.start()
    with open_checkpoint(path) as checkpoint:
        shapes = {name: (leaf.shape, leaf.dtype) for name, leaf in checkpoint.leaves.items()}
        clock.stop(leaves=len(shapes))


def whole_ours(clock, path, layout):
    """`ot.restore` into shardings."""
    import jax

    import orbax_t5x as ot

    restore = ot.restore
    target = abstract(read_shapes(path), layout)
    clock.start()
    state = restore(path, target)
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


def part_ours(clock, path):
    """`ot.restore` of views that are indexed by a plain function."""
    import jax

    import orbax_t5x as ot

    restore = ot.restore
    shapes = {name: (_eighth_shape(shape), dtype) for name, (shape, dtype) in read_shapes(path).items()}
    target = abstract(shapes, "single")

    def sliced(state, target):
        return jax.tree_util.tree_map(lambda view: view[eighth(view.shape)], state)

    clock.start()
    state = restore(path, target, [sliced])
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


# -- T5X's way: its msgpack file by Flax, its arrays by TensorStore into shardings, as `Checkpointer` and the importer
# read them


def _t5x_specs(path):
    import os

    from flax import serialization

    with open(os.path.join(path, "checkpoint"), "rb") as file:
        tree = serialization.msgpack_restore(file.read())
    specs = {}
    for name, spec in _t5x_leaves(tree["optimizer"]):
        spec["kvstore"]["path"] = os.path.join(path, spec["kvstore"]["path"])
        specs[name] = spec
    return specs


def _t5x_leaves(tree, prefix=""):
    for key, value in tree.items():
        if not isinstance(value, dict):
            continue
        if "driver" in value:
            yield prefix + key, value
        else:
            yield from _t5x_leaves(value, f"{prefix}{key}/")


def _gathered(coroutines):
    """As T5X waits for the arrays of a checkpoint."""
    import asyncio

    async def gather():
        return await asyncio.gather(*coroutines)

    return asyncio.new_event_loop().run_until_complete(gather())


def open_t5x(clock, path):
    """The msgpack file, then `tensorstore.open` of each spec: the shapes that T5X compares."""
    import flax.serialization
    import tensorstore as ts

    del flax
    clock.start()
    arrays = [ts.open(spec, open=True) for spec in _t5x_specs(path).values()]
    shapes = [(array.result().shape, array.result().dtype) for array in arrays]
    clock.stop(leaves=len(shapes))


def whole_t5x(clock, path, layout):
    """`async_deserialize` of all arrays at once, as `Checkpointer.restore` does with a partitioner."""
    import flax.serialization
    import jax
    from jax.experimental.array_serialization.serialization import async_deserialize

    del flax
    shapes, choose = read_shapes(path), shardings(layout)
    jax.devices()
    clock.start()
    specs = _t5x_specs(path)
    arrays = _gathered(
        async_deserialize(choose(tuple(shapes[name][0])), spec, shapes[name][0]) for name, spec in specs.items()
    )
    state = nested(dict(zip(specs, arrays, strict=True)))
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


def part_t5x(clock, path):
    """Slices of TensorStore arrays, as T5X's lazy arrays read what a host needs."""
    import flax.serialization
    import jax
    import tensorstore as ts

    del flax
    jax.devices()

    async def read(spec):
        array = await ts.open(spec, open=True)
        return await array[eighth(array.shape)].read()

    clock.start()
    specs = _t5x_specs(path)
    parts = _gathered(read(spec) for spec in specs.values())
    state = {name: jax.device_put(part) for name, part in zip(specs, parts, strict=True)}
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


# -- safetensors


def open_safetensors(clock, path):
    """`safe_open`, and the shape and dtype of each tensor."""
    from safetensors import safe_open

    clock.start()
    with safe_open(path, "numpy") as file:
        slices = [file.get_slice(name) for name in file.keys()]
        shapes = [(part.get_shape(), part.get_dtype()) for part in slices]
    clock.stop(leaves=len(shapes))


def whole_safetensors(clock, path, layout):
    """`safetensors.flax.load_file`, then `device_put` where the layout is of several devices."""
    import jax
    from safetensors.flax import load_file

    choose = shardings(layout)
    clock.start()
    state = load_file(path)
    if layout != "single":
        for name in state:
            state[name] = jax.device_put(state[name], choose(state[name].shape))
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


def part_safetensors(clock, path):
    """`get_slice` of each tensor, into JAX arrays."""
    import jax
    import safetensors.flax
    from safetensors import safe_open

    del safetensors
    jax.devices()
    clock.start()
    state = {}
    with safe_open(path, "flax") as file:
        for name in file.keys():
            part = file.get_slice(name)
            state[name] = part[eighth(part.get_shape())]
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


# -- Flax msgpack


def open_msgpack(clock, path):
    """`msgpack_restore` of the whole file: Flax has no other way to the shapes."""
    from flax import serialization

    clock.start()
    with open(path, "rb") as file:
        state = flattened(serialization.msgpack_restore(file.read()))
    shapes = [(value.shape, value.dtype) for value in state.values()]
    clock.stop(leaves=len(shapes))


def whole_msgpack(clock, path, layout):
    """`msgpack_restore`, then `device_put` of each array."""
    import jax
    from flax import serialization

    choose = shardings(layout)
    jax.devices()
    clock.start()
    with open(path, "rb") as file:
        state = flattened(serialization.msgpack_restore(file.read()))
    for name, value in state.items():
        state[name] = jax.device_put(value, jax.devices()[0] if layout == "single" else choose(value.shape))
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


def part_msgpack(clock, path):
    """The whole file, of which an eighth of each array is put on the device."""
    import jax
    from flax import serialization

    jax.devices()
    clock.start()
    with open(path, "rb") as file:
        state = flattened(serialization.msgpack_restore(file.read()))
    state = {name: jax.device_put(value[eighth(value.shape)]) for name, value in state.items()}
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


# -- Orbax


def open_orbax(clock, path):
    """`metadata` of a checkpointer."""
    import jax
    import orbax.checkpoint as ocp

    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    clock.start()
    tree = checkpointer.metadata(path).item_metadata.tree
    shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree_util.tree_leaves(tree)]
    clock.stop(leaves=len(shapes))


def whole_orbax(clock, path, layout):
    """A checkpointer restores into shardings."""
    _restore_orbax(clock, path, read_shapes(path), layout)


def part_orbax(clock, path):
    """Orbax cuts arrays to a smaller global shape where `strict` is off: their first rows."""
    shapes = {name: (_eighth_shape(shape), dtype) for name, (shape, dtype) in read_shapes(path).items()}
    _restore_orbax(clock, path, shapes, "single", strict=False)


def _restore_orbax(clock, path, shapes, layout, *, strict=True):
    import jax
    import orbax.checkpoint as ocp

    target = abstract(shapes, layout)
    as_read = jax.tree_util.tree_map(
        lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, strict=strict), target
    )
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    clock.start()
    state = checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=target, restore_args=as_read))
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


# -- TensorFlow


def open_tf_bundle(clock, path):
    """`load_checkpoint`, and its maps of shapes and dtypes."""
    import tensorflow as tf

    clock.start()
    reader = tf.train.load_checkpoint(path)
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    clock.stop(leaves=len(shapes), dtypes=len(dtypes))


# -- making the checkpoints


def _values():
    import numpy as np

    from benchmarks.data import mesh_tf_shapes

    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape, np.float32) for name, shape in mesh_tf_shapes()}


def make_safetensors(_, path):
    """By `safetensors`."""
    from safetensors.numpy import save_file

    flat = _values()
    save_file(flat, path)
    note_shapes(path, flat)


def make_msgpack(_, path):
    """By Flax."""
    from flax import serialization

    flat = _values()
    with open(path, "wb") as file:
        file.write(serialization.msgpack_serialize(nested(flat)))
    note_shapes(path, flat)


def make_orbax(_, path):
    """By stock Orbax, sharded by rows over 8 devices."""
    import jax
    import orbax.checkpoint as ocp

    choose = shardings("rows")
    flat = {name: jax.device_put(value, choose(value.shape)) for name, value in _values().items()}
    ocp.PyTreeCheckpointer().save(path, nested(flat))
    note_shapes(path, flat)


def make_t5x(_, path, codec):
    """The parameters of the bundle, as T5X writes them."""
    import numpy as np

    flat = {f"target/{name}": value for name, value in _values().items()}
    write_t5x(path, flat, codec)
    note_shapes(path, {**flat, "state/step": np.int32(_STEP)})


def write_t5x(path, flat, codec):
    """As T5X writes its version 3: `codec` is "gzip" (arrays of one device, and checkpoints made from TensorFlow's) or
    "zstd" (arrays sharded by rows over 8 devices, a chunk for each).
    """
    import os

    import numpy as np
    import tensorstore as ts
    from flax import serialization

    specs = {}
    for name, value in flat.items():
        spec = _t5x_spec(name, value.shape, value.dtype, codec)
        on_disk = {**spec, "kvstore": {"driver": "file", "path": os.path.join(path, spec["kvstore"]["path"])}}
        ts.open(on_disk, create=True, open=True).result().write(value).result()
        specs[name] = spec
    tree = {"version": 3, "optimizer": {**nested(specs), "state": {"step": np.int32(_STEP)}}}
    with open(os.path.join(path, "checkpoint"), "wb") as file:
        file.write(serialization.msgpack_serialize(tree))


def _t5x_spec(name, shape, dtype, codec):
    rows = shape[0]
    if codec == "zstd":
        rows = rows // 8 if rows % 8 == 0 else rows
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    while rows * row_bytes > _T5X_CHUNK_BYTES:
        rows = next(rows // factor for factor in (2, 3, 5, 7, rows) if rows % factor == 0)
    return {
        "driver": "zarr",
        "dtype": dtype.name,
        "kvstore": {"driver": "file", "path": name.replace("/", ".") + "/"},
        "metadata": {"shape": list(shape), "chunks": [rows, *shape[1:]], "compressor": {"id": codec, "level": 1}},
    }


if __name__ == "__main__":
    globals()[sys.argv[1]](Clock(), *sys.argv[2:])
