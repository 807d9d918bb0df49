"""Save with two processes on one mesh, restore with one process on another.

Two processes of two devices each train nothing but save a sharded state; one process of eight devices takes it over.
Nobody resaves: each process reads the boxes of its own shards.
"""

import importlib.resources
import multiprocessing
import os
import socket
import tempfile
from pathlib import Path

import numpy as np

bundle = importlib.resources.files("orbax_t5x") / "cli/demo_data/model.ckpt-1000000"  # yours


def target(shape, names):
    import jax
    import jax.numpy as jnp

    import orbax_t5x as ot
    from orbax_t5x.models import config_of
    from orbax_t5x.models.linen import T5

    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    ids = jnp.ones((1, 4), jnp.int32)
    variables = jax.eval_shape(T5(config_of(bundle)).init, jax.random.key(0), ids, ids)
    return {"params": ot.with_shardings(variables, mesh)["params"]}


def save(path, process, port):
    """One of two processes, with two devices of its own: the job that made the checkpoint."""
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"
    import jax
    import orbax.checkpoint as ocp

    import orbax_t5x as ot

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    state = ot.restore(bundle, target((2, 2), ("data", "model")), "auto", strict=False)
    with ocp.CheckpointManager(path, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(state))
    jax.distributed.shutdown()


if __name__ == "__main__":
    root = Path(tempfile.mkdtemp())
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    workers = [multiprocessing.get_context("spawn").Process(target=save, args=(root, i, port)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print("the two processes ended with", [worker.exitcode for worker in workers])

    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
    import jax

    import orbax_t5x as ot

    state = ot.restore(root / "0", target((4,), ("model",)))
    kernel = state["params"]["encoder"]["layers_0"]["attention"]["query"]["kernel"]
    print(f"one process, mesh {dict(kernel.sharding.mesh.shape)}: shards of {kernel.addressable_shards[0].data.shape}")
    original = ot.restore(bundle, target((4,), ("model",)), "auto", strict=False)
    same = jax.tree.map(np.array_equal, state, original)
    print("every leaf is equal to the bundle's:", all(jax.tree.leaves(same)))
