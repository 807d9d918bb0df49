"""One of several processes of a job.

`python -m tests.multihost.jobs.multiprocess_worker JOB COORDINATOR COUNT INDEX RESULT …`.

Writes its result as JSON into a file: collectives print to standard output. Run by `tests.support.jax_job.run_job`
under a timeout: a peer that dies takes the others with it. A job of another module in this folder is named
`module:function`.
"""

import importlib
import json
import os
import signal
import sys

from tests.support.xla import xla_flags

_DEVICES_EACH = 2
if __name__ == "__main__":  # other modules of jobs, and so tests, import this one
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = xla_flags(_DEVICES_EACH)

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_t5x as ot
from orbax_t5x.trees.flat import unflatten


def state_target(path, spec):
    """Everything of the translated bundle, sharded over all devices of all processes where the shape allows."""
    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    with ot.open_checkpoint(path) as opened:
        translated = ot.transforms.Translate()(opened.tree(), {})

    def place(leaf):
        dtype = np.int32 if leaf.dtype == np.int64 else leaf.dtype
        for sharding in (NamedSharding(mesh, spec), NamedSharding(mesh, PartitionSpec())):
            try:
                sharding.shard_shape(leaf.shape)
                return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)
            except (ValueError, IndexError):
                pass
        raise AssertionError(leaf)

    return jax.tree.map(place, translated, is_leaf=lambda leaf: hasattr(leaf, "shape"))


def local_digest(state):
    """Names and sums of all shards of this process, to compare with NumPy outside."""
    flat = ot.state_utils.flatten_state_dict(state)
    return {
        name: [
            [[part.start or 0, part.stop] for part in shard.index] + [float(np.sum(np.asarray(shard.data, np.float64)))]
            for shard in array.addressable_shards
        ]
        for name, array in flat.items()
    }


def restore(path, spec):
    """Restores a bundle; tells what was read and verified."""
    spec = {"rows": PartitionSpec("x"), "columns": PartitionSpec(None, "x")}[spec]
    plan = ot.plan_restore(path, state_target(path, spec), [ot.transforms.Translate()])
    state = plan.execute()
    report = plan.report
    return {
        "planned": plan.bytes_to_read,
        "read": report.bytes_read,
        "verified": len(report.verified),
        "unverified": list(report.unverified),
        "shards": local_digest(state),
    }


def grow(path, rows):
    """The embedding with more rows, the new ones from a traced function; tells what was read and what came back."""
    name = "target/token_embedder/embedding"
    sharding = NamedSharding(Mesh(np.asarray(jax.devices()), ("x",)), PartitionSpec("x"))
    with ot.open_checkpoint(path) as opened:
        width = opened.leaves["shared/embedding"].shape[1]
    shape = (int(rows), width)
    target = unflatten({name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)})

    def initialize():
        return unflatten({name: jax.random.normal(jax.random.key(0), shape)})

    transforms = [ot.transforms.Translate(), ot.transforms.Pad(name, (shape[0], None), ot.transforms.FALLBACK)]
    plan = ot.plan_restore(path, target, transforms, fallback=initialize, strict=False)
    array = plan.execute()["target"]["token_embedder"]["embedding"]
    shards = [[shard.index[0].start or 0, np.asarray(shard.data).tolist()] for shard in array.addressable_shards]
    return {"planned": plan.bytes_to_read, "read": plan.report.bytes_read, "shards": shards}


def restore_first_rows(path, *names):
    """Four rows of each of some matrices, one for each device, and checksums of all that is stored of them."""
    sharding = NamedSharding(Mesh(np.asarray(jax.devices()), ("x",)), PartitionSpec("x"))
    with ot.open_checkpoint(path) as opened:
        shapes = {name: (4, *opened.leaves[name].shape[1:]) for name in names}
    target = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding) for name, shape in shapes.items()}
    transforms = [ot.transforms.Slice(f"({'|'.join(names)})", np.s_[:4])]
    plan = ot.plan_restore(path, target, transforms, strict=False, is_resuming=False)
    state = plan.execute(verify="full")
    report = plan.report
    rows = {name: float(shard.data.sum()) for name in names for shard in state[name].addressable_shards[:1]}
    return {"read": report.bytes_read, "verified": report.verified, "unverified": report.unverified, "rows": rows}


def restore_where_one_fails(path):
    """The second process can not read."""
    plan = ot.plan_restore(path, state_target(path, PartitionSpec("x")), [ot.transforms.Translate()])
    if jax.process_index() == 1:
        plan.checkpoints[""].close()
    plan.execute()


def save_and_restore(path, root):
    """Through a CheckpointManager with our handler, and back."""
    target = state_target(path, PartitionSpec("x"))
    transforms = [ot.transforms.Translate()]
    state = ot.restore(path, target, transforms)
    with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(3, args=ot.args.TrainStateSave(state))
        manager.wait_until_finished()
        again = manager.restore(3, args=ot.args.TrainStateRestore(target))
    same = jax.tree.all(jax.tree.map(lambda a, b: local_digest({"a": a}) == local_digest({"a": b}), state, again))
    return {"same": bool(same)}


def attempt(job, *arguments):
    """What a job tells, or its error."""
    try:
        return job(*arguments)
    except (ot.errors.CheckpointError, ValueError) as error:
        told = {name: getattr(error, name, None) for name in ("leaf", "path")}
        return {**told, "error": type(error).__name__, "text": str(error)}


def in_turn(cases):
    """What each of several jobs tells, by its name; each is its function and its arguments."""
    return {name: attempt(globals()[job], *arguments) for name, (job, *arguments) in json.loads(cases).items()}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def restore_where_one_dies(path, where):
    """The second process is killed while it reads, or while it plans."""
    target = state_target(path, PartitionSpec("x"))
    transforms = [ot.transforms.Translate()]

    def die_here(*_):
        if jax.process_index() == 1:
            die()

    if where == "reading":
        ot.restore(path, target, transforms, progress=die_here)
    else:
        chain = [lambda state, target, *, is_resuming=False: die_here() or state, *transforms]
        ot.TrainStateHandler().restore(epath.Path(path), ot.args.TrainStateRestore(target, chain))


# Jobs after which a process ends without the others, although JAX's own end waits for all.
_ENDS_ALONE = ("_where_one_dies",)
_HEARTBEAT_SECS = 15  # after which JAX ends those that wait for a process that was killed


def main():
    job, coordinator, count, index, result_path, *arguments = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    times = {"heartbeat_timeout_seconds": _HEARTBEAT_SECS} if job.endswith(_ENDS_ALONE) else {}
    jax.distributed.initialize(coordinator, int(count), int(index), initialization_timeout=800, **times)
    module, _, name = job.rpartition(":")
    jobs = vars(importlib.import_module(f"tests.multihost.jobs.{module}")) if module else globals()
    result = attempt(jobs[name], *arguments)
    with open(result_path, "w") as file:
        json.dump(result, file)
    if job.endswith(_ENDS_ALONE):
        os._exit(0)
    multihost_utils.sync_global_devices("done")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
