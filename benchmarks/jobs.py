"""The jobs that are compared; each runs alone in a process: `python -m benchmarks.jobs NAME ARGUMENTS…`.

Imports stand inside the jobs: what a job imports is part of what it costs.
"""

from __future__ import annotations

import sys

from benchmarks.measure import Clock
from benchmarks.states import abstract, flattened, nested, note_shapes, read_shapes, result_mib, shardings

# -- the floor


def read_floor(clock, path):
    """All bytes of the files under a path, or that begin with it, into fresh memory: one thread, one pass, no checksum.

    What no restore from the page cache can be faster than.
    """
    import glob
    import os

    import numpy as np

    found = [os.path.join(top, name) for top, _, names in os.walk(path) for name in names]
    files = sorted(found or glob.glob(glob.escape(path) + "*"))
    held = []
    clock.start()
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            buffer = np.empty(os.path.getsize(file), np.uint8)
            at = 0
            while at < buffer.size:
                at += os.readv(stream.fileno(), [buffer[at : at + (1 << 20)]])
            held.append(buffer)
    clock.stop(read_MiB=sum(buffer.nbytes for buffer in held) / (1 << 20))


# -- a bundle into a sharded state


def bundle_ours(clock, prefix, state_path, layout, *options):
    """`ot.restore` with Translate."""
    import jax

    import orbax_t5x as ot

    transforms = [ot.transforms.Translate()]
    restore = ot.restore
    target = abstract(read_shapes(state_path), layout)
    clock.start()
    state = restore(prefix, target, transforms, verify="off" if "unverified" in options else "touched")
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


def bundle_tensorflow(clock, prefix, state_path, layout):
    """TensorFlow's reader and `jax.device_put`: whole tensors, as T5X restores them; Adafactor's placeholders from
    zeros.
    """
    import jax
    import numpy as np
    import tensorflow as tf

    choose = shardings(layout)
    placeholders = [name for name, (shape, _) in read_shapes(state_path).items() if shape == [1]]
    jax.devices()
    clock.start()
    reader = tf.train.load_checkpoint(prefix)
    state = {}
    for name in reader.get_variable_to_shape_map():
        value = reader.get_tensor(name)
        if name == "global_step":
            value = value.astype(np.int32)
        state[name] = jax.device_put(value, choose(value.shape))
    for name in placeholders:
        state[name] = jax.device_put(np.zeros((1,), np.float32), choose((1,)))
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


def orbax_plain(clock, path, layout):
    """Stock Orbax restoring the same values into the same shardings."""
    import jax
    import orbax.checkpoint as ocp

    target = abstract(read_shapes(path), layout)
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    arguments = ocp.args.PyTreeRestore(item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
    clock.start()
    state = checkpointer.restore(path, args=arguments)
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


def orbax_ours(clock, path, layout):
    """`ot.restore` of an Orbax checkpoint."""
    import jax

    import orbax_t5x as ot

    restore = ot.restore
    target = abstract(read_shapes(path), layout)
    clock.start()
    state = restore(path, target)
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


# -- whole checkpoints


def diff_ours(clock, path, other, *options):
    """`ot.diff` of two checkpoints; "cast": one side as float64, so that numbers are compared and not bits."""
    import orbax_t5x as ot

    compare_two = ot.diff
    transforms = ot.transforms.Cast(".*", "float64") if "cast" in options else ()
    clock.start()
    report = compare_two(path, other, transforms)
    clock.stop(equal=float(all(leaf.status in ("equal", "dtype") for leaf in report.leaves)))


def diff_numpy(clock, path, other):
    """What one would write without it: Orbax restores both as NumPy arrays, NumPy compares them."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())

    def restore(place):
        tree = checkpointer.metadata(place).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return checkpointer.restore(place, args=ocp.args.PyTreeRestore(restore_args=as_numpy))

    clock.start()
    equal = jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), restore(path), restore(other)))
    clock.stop(equal=float(equal))


# -- transforms


def rename_ours(clock, path, layout):
    """Every leaf under another name, by one rule."""
    import jax

    import orbax_t5x as ot

    restore = ot.restore
    target = abstract({"renamed/" + name: leaf for name, leaf in read_shapes(path).items()}, layout)
    transforms = [ot.transforms.AssignmentMap([(r"renamed/(.*)", r"\1")])]
    clock.start()
    state = restore(path, target, transforms)
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


def rename_orbax_transforms(clock, path, layout):
    """The same through Orbax's own `transforms`."""
    import jax
    import orbax.checkpoint as ocp

    target = abstract({"renamed/" + name: leaf for name, leaf in read_shapes(path).items()}, layout)
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    arguments = ocp.args.PyTreeRestore(
        item=target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        transforms={r"renamed/(.*)": ocp.Transform(original_key=r"\1")},
    )
    clock.start()
    state = checkpointer.restore(path, args=arguments)
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


def stack_ours(clock, path, layout):
    """Layers stacked on axis 1 while they are read."""
    import jax
    import numpy as np

    import orbax_t5x as ot

    restore = ot.restore
    choose = shardings(layout)
    groups = _layer_groups(read_shapes(path))
    target = nested(
        {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=choose(shape)) for name, (shape, _) in groups.items()}
    )
    transforms = [ot.transforms.StackLayers(r"decoder/layers_(?P<i>\d+)/(.*)", r"decoder/\2", 1)]
    clock.start()
    state = restore(path, target, transforms)
    jax.block_until_ready(state)
    clock.stop(result_MiB=lambda: result_mib(state))


def stack_plain(clock, path, layout):
    """Plain Orbax restore, then `jnp.stack` under `jit`, group by group, layers freed as they are used."""
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    target = abstract(read_shapes(path), layout)
    choose = shardings(layout)
    groups = _layer_groups(read_shapes(path))
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    arguments = ocp.args.PyTreeRestore(item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
    clock.start()
    layers = flattened(checkpointer.restore(path, args=arguments))
    state = {}
    for name, (shape, members) in groups.items():
        stack = jax.jit(lambda parts: jnp.stack(parts, 1), out_shardings=choose(shape))
        state[name] = jax.block_until_ready(stack([layers.pop(member) for member in members]))
    clock.stop(result_MiB=lambda: result_mib(state))


def _layer_groups(shapes):
    """Stacked name -> (stacked shape, the layers' names in order)."""
    groups = {}
    for name, (shape, _) in shapes.items():
        _, layer, rest = name.split("/", 2)
        members = groups.setdefault("decoder/" + rest, ([], {}))
        members[0][:] = shape
        members[1][int(layer.removeprefix("layers_"))] = name
    return {
        name: ((shape[0], len(members), *shape[1:]), [members[layer] for layer in sorted(members)])
        for name, (shape, members) in groups.items()
    }


def plan_many(clock, path):
    """Plans a restore of all leaves of `data.many_leaves` through 100 rules; reads nothing."""
    import jax
    import numpy as np

    import orbax_t5x as ot

    sharding = shardings("rows")((8, 8))
    leaf = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding)
    rules = [ot.transforms.AssignmentMap([(rf"new_{rule}/(.*)", rf"old_{rule}/\1") for rule in range(100)])]
    plan_restore = ot.plan_restore
    with ot.open_checkpoint(path) as source:
        target = nested({name.replace("old", "new"): leaf for name in source.leaves})
        clock.start()
        plan = plan_restore(source, target, rules)
        clock.stop(entries=len(plan.entries), bytes_to_read=plan.bytes_to_read)


# Cases of `match_rules`: 10,000 names, and 100 rules of which the first, any one, or none matches.
_RULES = {
    "early": (r"target/(encoder|decoder)/layers_(\d+)/(.*)", *(rf"target/other_{rule}/(.*)" for rule in range(99))),
    "families": tuple(rf"(.*)/part_{rule}/(.*)" for rule in range(100)),
    "none": tuple(rf"(.*)/absent_{rule}/(.*)" for rule in range(100)),
}


def match_rules(clock, case, way):
    """Finds the first rule for each of 10,000 names: by the table, or by trying compiled patterns in turn."""
    import re

    from orbax_t5x.transforms.patterns.table import RuleTable

    patterns = _RULES[case]
    names = [
        f"target/{tower}/layers_{index}/part_{index % 100}/kernel"
        for tower in ("encoder", "decoder")
        for index in range(5_000)
    ]
    re.purge()
    clock.start()
    if way == "table":
        first = RuleTable(patterns).first
    else:
        compiled = [re.compile(pattern).fullmatch for pattern in patterns]

        def first(name):
            return next((index for index, fullmatch in enumerate(compiled) if fullmatch(name)), None)

    found = sum(first(name) is not None for name in names)
    clock.stop(matched=found)


# -- imports


def import_orbax(clock):
    """`import orbax.checkpoint`."""
    clock.start()
    import orbax.checkpoint

    clock.stop()
    del orbax


def import_ours(clock):
    """`import orbax_t5x` and Orbax, which its users have anyway."""
    clock.start()
    import orbax.checkpoint

    import orbax_t5x

    clock.stop()
    del orbax, orbax_t5x


# -- making what is restored


def write_plain_bundle(_, prefix, scale):
    """The bundle of `data.plain_bundle`, without TensorFlow."""
    from pathlib import Path

    import numpy as np

    from benchmarks.data import scaled_shapes
    from tests.support.bundle_writer import bundle_of

    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal(shape, np.float32) for name, shape in scaled_shapes(float(scale))}
    note_shapes(prefix, arrays)
    bundle_of(arrays).write(Path(prefix).parent, Path(prefix).name)


def write_state(_, prefix, path):
    """The bundle's values under T5X's names, saved by stock Orbax."""
    import numpy as np
    import orbax.checkpoint as ocp

    import orbax_t5x as ot

    state = ot.restore(prefix, None, [ot.transforms.Translate()])
    flat = ot.state_utils.flatten_state_dict(state)
    flat["state/step"] = np.asarray(flat["state/step"], np.int32)
    ocp.PyTreeCheckpointer().save(path, nested(flat))
    note_shapes(path, flat)


def write_layers(_, path, layers):
    """A tree of float32 layers, sharded by rows over 8 devices, saved by stock Orbax."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    from benchmarks.data import layer_shapes

    choose, random = shardings("rows"), np.random.default_rng(0)
    flat = {
        name: jax.device_put(random.standard_normal(shape, np.float32), choose(shape))
        for name, shape in layer_shapes(int(layers)).items()
    }
    ocp.PyTreeCheckpointer().save(path, nested(flat))
    note_shapes(path, flat)


def write_small(_, path, count):
    """Many small leaves, as stock Orbax saves them."""
    import numpy as np
    import orbax.checkpoint as ocp

    random = np.random.default_rng(0)
    flat = {
        f"block_{index % 30}/layer_{index}/scale": random.standard_normal(64, np.float32) for index in range(int(count))
    }
    ocp.PyTreeCheckpointer().save(path, nested(flat))
    note_shapes(path, flat)


if __name__ == "__main__":
    globals()[sys.argv[1]](Clock(), *sys.argv[2:])
