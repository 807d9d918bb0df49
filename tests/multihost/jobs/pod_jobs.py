"""Jobs of `multiprocess_worker`: what a training run on a pod does, with as many processes as it has this time."""

import itertools
import math
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency

import orbax_t5x as ot
from orbax_t5x.trees.flat import flatten, unflatten
from tests.multihost.jobs.broadcast_jobs import check_equal, file_bytes, mesh, placed

P = PartitionSpec


def state_of(arrays, placing):
    """Arrays of a run, on all devices."""
    return unflatten(
        {
            name: jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index, array=array: array[index])
            for name, array in arrays.items()
            for leaf in [placed(array.shape, array.dtype, placing)]
        }
    )


def abstract(arrays, placing):
    return unflatten({name: placed(array.shape, array.dtype, placing) for name, array in arrays.items()})


def run(folder, step, source, native):
    """Goes on from a step that another number of processes wrote, and saves the next; then what a job may begin with.

    Args:
      folder: with `arrays.npz`, the state, and `root`, the run.
      step: the newest of the run.
      source, native: a bundle, and a step of T5X's.
    """
    step, folder = int(step), Path(folder)
    with np.load(folder / "arrays.npz") as file:
        arrays = dict(file)
    root = folder / "root"
    with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
        for placing, broadcast in (("rows", False), ("columns", False), ("replicated", True), ("data parallel", True)):
            args = ot.args.TrainStateRestore(abstract(arrays, placing), broadcast=broadcast)
            check_equal(manager.restore(step, args=args), arrays)
        state, resumed, how = ot.restore_or_initialize(manager, abstract(arrays, "rows"), broadcast=True)
        assert (resumed, how) == (step, "resumed")
        check_equal(state, arrays)
        manager.save(step + 1, args=ot.args.TrainStateSave(state))
        manager.wait_until_finished()
    for broadcast in (False, True):
        check_surgery(root, arrays, broadcast)
        check_begin(source, [ot.transforms.Translate()], broadcast)
        check_begin(native, [], broadcast)
    return own_bytes(folder, root, arrays)


def check_surgery(root, arrays, broadcast):
    """Renamed, and layers stacked."""
    stack = ot.transforms.StackLayers(r"params/layers_(?P<i>\d+)/(.*)", r"params/layers/\2", 1)
    rename = ot.transforms.Rename([("params/embedding", "params/token_embedder/embedding")])
    expected = {
        "params/layers/kernel": np.stack([arrays[f"params/layers_{index}/kernel"] for index in range(3)], 1),
        "params/token_embedder/embedding": arrays["params/embedding"],
    }
    target = abstract(expected, "rows")
    restored = ot.restore(root, target, [stack, rename], strict=False, broadcast=broadcast, is_resuming=False)
    check_equal(restored, expected)


def check_begin(source, transforms, broadcast):
    """Everything of a checkpoint of another format, beside what one process reads alone."""
    expected = {
        name: value for name, value in flatten(ot.restore(source, None, transforms)).items() if hasattr(value, "dtype")
    }
    restored = ot.restore(source, abstract(expected, "rows"), transforms, strict=False, broadcast=broadcast)
    check_equal(restored, expected)


def own_bytes(folder, root, arrays):
    """What this process reads of rows: from byte ranges, and from chunks of files; and what its shards are."""
    told = {}
    for name, source in (("ranges", folder / "model.safetensors"), ("chunks", root / "0")):
        plan = ot.plan_restore(source, abstract(arrays, "rows"))
        before = file_bytes()
        state = plan.execute()
        shards = {
            (name, str(shard.index)): shard.data.nbytes
            for name, array in flatten(state).items()
            if isinstance(array, jax.Array)
            for shard in array.addressable_shards
        }
        told[name] = {
            "shards": sum(shards.values()),
            "chunks": sum(chunk_bytes(entry) for entry in plan.entries),
            "read": plan.report.bytes_read + plan.report.gap_bytes,
            "from files": file_bytes() - before,
        }
    return told


def chunk_bytes(entry):
    """Bytes of the chunks of a leaf that hold the boxes of an entry, before they are compressed."""
    (leaf,) = entry.leaves
    chunks = leaf.chunks or leaf.shape
    touched = {
        tuple(corner)
        for box in entry.boxes()
        for corner in itertools.product(
            *(range(start // size, -(-stop // size)) for (start, stop), size in zip(box, chunks, strict=True))
        )
    }
    return len(touched) * math.prod(chunks) * leaf.dtype.itemsize


def managers(folder):
    """Orbax's managers for pods, two processes: each is a slice."""
    folder = Path(folder)
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    told = {}

    # One process lists the steps, and tells the others.
    options = ocp.CheckpointManagerOptions(single_host_load_and_broadcast=True)
    target = {"w": placed((8, 8), array.dtype, "rows")}
    with ocp.CheckpointManager(folder / "single", options=options, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(3, args=ot.args.TrainStateSave(state_of({"w": array}, "rows")))
        manager.wait_until_finished()
        args = ot.args.TrainStateRestore(target, broadcast=True)
        check_equal(manager.restore(manager.latest_step(), args=args), {"w": array})
        told["single host"] = manager.all_steps()

    # Orbax's way of one reader for all replicas, beside ours.
    replicated = {"w": placed((8, 8), array.dtype, "data parallel")}
    one_replica = ocp.type_handlers.SingleReplicaArrayHandler(replica_axis_index=0, primary_replica_id=0)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, one_replica))
    handler = ot.TrainStateHandler(type_handler_registry=registry)
    with ocp.CheckpointManager(folder / "replica", item_handlers=handler) as manager:
        manager.save(3, args=ot.args.TrainStateSave(state_of({"w": array}, "data parallel")))
        manager.wait_until_finished()
        args = ot.args.TrainStateRestore(replicated, broadcast=True)
        check_equal(manager.restore(3, args=args), {"w": array})
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer:
        by_replica = ocp.type_handlers.SingleReplicaArrayRestoreArgs(
            sharding=replicated["w"].sharding,
            single_replica_sharding=NamedSharding(
                jax.sharding.Mesh(mesh().devices[:1], ("data", "model")), P(None, "model")
            ),
            global_shape=(8, 8),
            dtype=array.dtype,
        )
        restored = checkpointer.restore(
            folder / "replica" / "3" / "default",
            args=ocp.args.PyTreeRestore({"w": array}, restore_args={"w": by_replica}),
        )
        check_equal(restored, {"w": array})
    told["replica"] = True
    told["emergency"] = emergency_steps(folder, array)
    return told


def emergency_steps(folder, array):
    """Steps of Orbax's emergency manager, the persistent one and this slice's own, read by this package."""
    ocp.multihost.initialize_runtime_to_distributed_ids()
    ocp.multihost.initialize_distributed_to_device_ids()
    local = folder / f"local_{jax.process_index()}"
    local.mkdir()
    state = state_of({"w": array}, "data parallel")
    options = emergency.CheckpointManagerOptions(
        local=emergency.LocalCheckpointOptions(save_interval_steps=1),
        persistent=emergency.PersistentCheckpointOptions(save_interval_steps=1),
        enable_async_checkpointing=False,
    )
    persistent = folder / "persistent"
    with emergency.CheckpointManager(
        local, persistent, mesh(), jax.tree.map(ocp.utils.to_shape_dtype_struct, state), options=options
    ) as manager:
        manager.save(1, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
        manager.wait_until_finished()
    target = {"w": placed((8, 8), array.dtype, "data parallel")}
    check_equal(ot.restore(persistent, target, broadcast=True), {"w": array})
    own = sorted(path.relative_to(local).as_posix() for path in local.rglob("_METADATA"))
    for name in own:
        check_equal({"w": ot.open_checkpoint((local / name).parent).leaves["w"].get()}, {"w": array})
    return own
